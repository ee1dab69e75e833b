"""Jupyter kernels on fractions of a GPU. Light to import: rooms are imported by whoever needs them."""

__version__ = "0.1.0"
__distribution__ = "jupyter-fractional-gpu"  # by which this package is told from another module of its name
