"""`jupyter gpu node`: what runs beside the broker on a cluster's nodes: the agent and Slurm's scripts, their installation and checks."""
