"""Clusters' engines: the node agent that gives Slurm and Kubernetes the broker's numbers, and what makes a job's allocation a seat."""
