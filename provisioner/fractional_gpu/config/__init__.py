"""Pools, devices and policies as traitlets, and their translation into core's plain types."""

from fractional_gpu.config.pools import ALL_KEYS as POOL_KEYS
from fractional_gpu.config.pools import COMMON_KEYS as COMMON_POOL_KEYS
from fractional_gpu.config.pools import PoolSettings
from fractional_gpu.config.settings import CONFIG_NAME, Settings, example_config, load
from fractional_gpu.config.traits import GPUBroker
from fractional_gpu.config.values import ConfigError

__all__ = [
    "COMMON_POOL_KEYS", "CONFIG_NAME", "POOL_KEYS", "ConfigError", "GPUBroker", "PoolSettings", "Settings", "example_config", "load",
]  # fmt: skip
