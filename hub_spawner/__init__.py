"""Fractions of GPUs for JupyterHub: the mixin, ready spawners, and `configure` for `jupyterhub_config.py`."""

from hub_spawner.configuration import configure

__all__ = ["configure"]
