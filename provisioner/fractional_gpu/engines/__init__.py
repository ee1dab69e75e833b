"""Cluster engines: the node agent that gives Slurm and Kubernetes the broker's numbers, and the seats of jobs and pods."""
