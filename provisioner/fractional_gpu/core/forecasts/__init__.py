"""Forecasts learnt from swaps, cells and waits, their accuracy, and advice about shares."""
