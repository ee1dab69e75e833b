"""Pools, devices and policies as traitlets, and their translation into core's plain types."""
