"""Spawners for clusters whose engine chooses the node, and whose allocation becomes the seat."""

from fractional_gpu_hub.engines.offers import NodePool
from fractional_gpu_hub.engines.spawner import Allocation, EngineGPUMixin

__all__ = ["Allocation", "EngineGPUMixin", "NodePool"]
