"""Spawners for clusters. An engine such as Slurm chooses the node, and the engine's allocation becomes the seat."""

from fractional_gpu_hub.engines.offers import NodePool
from fractional_gpu_hub.engines.spawner import Allocation, EngineGPUMixin

__all__ = ["Allocation", "EngineGPUMixin", "NodePool"]
