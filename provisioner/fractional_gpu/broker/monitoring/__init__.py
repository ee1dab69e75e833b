"""Periodic observations: device use, host memory, unresponsive and abandoned kernels, its own event loop."""
