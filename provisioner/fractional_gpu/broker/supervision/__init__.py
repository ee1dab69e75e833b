"""Watches kernels between events: whether they exceed their caps, whether idle ones are really idle, and what they leave behind."""
