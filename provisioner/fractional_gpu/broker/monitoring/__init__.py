"""Watches device use, host memory, unresponsive and abandoned kernels, and the broker's own event loop."""
