"""Many hosts behind an engine (Slurm, Kubernetes) that knows numbers only: how it gives a job its node, and how long jobs queue there."""

from fractional_gpu.simulator.cluster.node import WaitTerms
from fractional_gpu.simulator.cluster.run import EngineDoor, run_engine

__all__ = ["EngineDoor", "WaitTerms", "run_engine"]
