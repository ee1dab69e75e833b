"""Pools, devices and policies as traitlets, and their translation into core's plain types."""

from fractional_gpu.config.example import example_config
from fractional_gpu.config.keys import ConfigError
from fractional_gpu.config.loading import CONFIG_NAME, load
from fractional_gpu.config.pools import PoolSettings
from fractional_gpu.config.settings import Settings
from fractional_gpu.config.traits import GPUBroker

__all__ = ["CONFIG_NAME", "ConfigError", "GPUBroker", "PoolSettings", "Settings", "example_config", "load"]
