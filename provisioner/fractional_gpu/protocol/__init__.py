"""The messages and errors of the broker's socket. No I/O; kernels load this."""
