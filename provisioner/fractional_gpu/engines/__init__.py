"""Cluster engines: the node agent that reports the broker's capacity to Slurm and Kubernetes, and the seats for jobs and pods."""
