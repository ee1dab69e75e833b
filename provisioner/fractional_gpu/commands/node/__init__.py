"""`jupyter gpu node`: what runs on a cluster's nodes beside the broker: the agent, Slurm's scripts, their installation and examination."""
