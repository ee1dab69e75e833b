"""Clusters' engines: the node agent that gives Slurm and Kubernetes the broker's numbers, and what makes a job's allocation a seat.

- `engine`: what an engine offers the agent, and its errors; `agent`: the loop
- `slurm`: Slurm's commands; `kubernetes`: a node's counts and its pods
- `summary`: what the agent publishes of the broker's capacity
- `job_seats`: the seat of a Slurm job, its files, and how it begins and ends; `accounting`: a job's figures from the meter
- `job_keeper`: jobs whose seat was missed or left; `pod_seats`: the seats of a node's pods
- `hooks`: Prolog and Epilog; `files`: the files that Slurm's and systemd's configuration name; `site_files`: a site's own
"""
