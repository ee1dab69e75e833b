"""The settings of a broker and its pools. The arbiter and hubs use them, too."""

from fractional_gpu.config.pools import COMMON_KEYS as COMMON_POOL_KEYS
from fractional_gpu.config.pools import POOL_KEYS, Pool
from fractional_gpu.config.settings import CONFIG_NAME, SETTINGS, Settings, example_config, load
from fractional_gpu.config.values import ConfigError

__all__ = [
    "COMMON_POOL_KEYS", "CONFIG_NAME", "POOL_KEYS", "SETTINGS", "ConfigError", "Pool", "Settings", "example_config", "load",
]  # fmt: skip
