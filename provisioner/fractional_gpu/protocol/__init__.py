"""Messages and errors sent over the broker's socket. Kernels load this package, and it does no I/O."""
