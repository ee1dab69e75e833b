"""JupyterHub: seats from pools (spawner mixin, pools, service)."""
