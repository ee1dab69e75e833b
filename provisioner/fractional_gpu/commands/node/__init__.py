"""`jupyter gpu node`: what runs on a cluster's nodes next to the broker: the agent, Slurm's scripts, and how to install and check them."""
