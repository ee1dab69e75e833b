"""Cluster engines: the node agent that reports the broker's capacity to Slurm and Kubernetes, and the seats of jobs and pods."""
