"""Support for cluster engines: a node agent that reports the broker's capacity to Slurm or Kubernetes, and seats for jobs and pods."""
