"""Clusters' engines: the node agent that gives Slurm and Kubernetes the broker's numbers, and what makes a job's allocation a seat.

- `engine`: what an engine offers the agent, and its errors; `slurm`: Slurm's commands; `agent`: the loop
- `summary`: what the agent publishes of the broker's capacity
- `job_seats`: the seat of a Slurm job, its files, and how it begins and ends; `accounting`: a job's figures from the meter
- `hooks`: Prolog and Epilog; `files`: the files that Slurm's and systemd's configuration name
"""
