"""Checks whether kernels exceed their memory caps, whether idle ones are really idle, and what kernels leave behind when they end."""
