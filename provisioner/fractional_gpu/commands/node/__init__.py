"""`jupyter gpu node` runs, installs and checks the agent and Slurm's scripts, which run next to the broker on a cluster's nodes."""
