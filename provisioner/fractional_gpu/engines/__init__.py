"""Slurm and Kubernetes: the node agent that reports the broker's capacity to them, and the code that turns allocations into seats."""
