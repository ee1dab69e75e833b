"""Spawners for clusters: the engine chooses the node, and its allocation is the seat."""

from fractional_gpu_hub.engines.offers import NodePool
from fractional_gpu_hub.engines.spawner import Allocation, EngineGPUMixin

__all__ = ["Allocation", "EngineGPUMixin", "NodePool"]
