"""Suspending and resuming kernels: the steps of a swap, its operations, and the consequences of a driver error."""
