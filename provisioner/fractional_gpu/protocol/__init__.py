"""Messages and errors that cross the broker's socket. This package does no I/O, and kernels load it."""
