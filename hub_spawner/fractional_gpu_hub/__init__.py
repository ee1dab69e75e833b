"""Fractional GPUs for JupyterHub: the mixin, ready-made spawners, and `configure` for `jupyterhub_config.py`."""

from fractional_gpu_hub.configuration import configure

__all__ = ["configure"]
