"""Learns forecasts from swaps, cells and waits, tracks their accuracy, and gives advice about shares."""
