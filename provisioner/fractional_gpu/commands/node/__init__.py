"""`jupyter gpu node` runs, installs and checks the agent and the Slurm scripts, which run alongside the broker on cluster nodes."""
