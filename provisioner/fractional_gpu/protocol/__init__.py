"""Messages and errors sent over the broker's socket. This package is loaded by kernels and does no I/O."""
