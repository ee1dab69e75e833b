"""What the broker observes periodically: device use, host memory, unresponsive and abandoned kernels, its own event loop."""
