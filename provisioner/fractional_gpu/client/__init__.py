"""Clients for the broker, and the code that finds it.

Kernels load this package, so it imports only the standard library, msgspec and jupyter_core.
"""
