"""Pools, devices and policies as traitlets, and their translation into core's plain types."""

from provisioner.config.errors import ConfigError
from provisioner.config.example import example_config
from provisioner.config.loading import CONFIG_NAME, load
from provisioner.config.pools import PoolSettings
from provisioner.config.settings import Settings
from provisioner.config.traits import GPUBroker

__all__ = ["CONFIG_NAME", "ConfigError", "GPUBroker", "PoolSettings", "Settings", "example_config", "load"]
