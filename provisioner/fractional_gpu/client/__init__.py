"""The clients of the broker, and where to find it. Kernels load this: the standard library, msgspec and jupyter_core only."""
