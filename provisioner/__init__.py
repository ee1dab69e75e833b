"""Jupyter kernels on fractions of a GPU. Light to import: rooms are imported by whoever needs them."""

__version__ = "0.1.0"
