"""Suspending and resuming: the steps of a swap, its operations, and what an error of the driver means."""
