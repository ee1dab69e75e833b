"""What crosses the broker's socket. No I/O; kernels load this room."""
