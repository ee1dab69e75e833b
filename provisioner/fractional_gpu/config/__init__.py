"""Pools, devices and policies as traitlets, and their translation into core's plain types."""

from fractional_gpu.config.pools import PoolSettings
from fractional_gpu.config.settings import CONFIG_NAME, Settings, example_config, load
from fractional_gpu.config.traits import GPUBroker
from fractional_gpu.config.values import ConfigError

__all__ = ["CONFIG_NAME", "ConfigError", "GPUBroker", "PoolSettings", "Settings", "example_config", "load"]
