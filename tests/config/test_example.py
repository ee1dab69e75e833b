"""The example works unchanged, and with everything in it switched on; it explains every setting."""

import re
from collections.abc import Callable
from pathlib import Path

from fractional_gpu.config import POOL_KEYS, SETTINGS, Settings, example_config, load

Write = Callable[..., Path]


def _switched_on(text: str) -> str:
    """Remove the help and the comment signs before settings."""
    lines = (line for line in text.splitlines() if not line.startswith("##"))
    return "\n".join(re.sub(r"^# (?=c\.|    |})", "", line) for line in lines)


def _values(settings: Settings) -> dict[str, object]:
    pools = [{key: getattr(pool, key) for key in POOL_KEYS} for pool in settings.pools]
    return {name: getattr(settings, name) for name in SETTINGS} | {"pools": pools}


def test_the_example_loads_and_changes_nothing(write: Write) -> None:
    assert _values(load(write(example_config()))) == _values(load())


def test_everything_in_the_example_can_be_switched_on(write: Write) -> None:
    settings, defaults = _values(load(write(_switched_on(example_config())))), _values(load())
    same = {name for name in SETTINGS if settings[name] == defaults[name]}
    assert same == {"pools"}  # each key of the example's pool has its default


def test_each_setting_and_each_key_of_a_pool_is_explained() -> None:
    for name, setting in {**SETTINGS, **POOL_KEYS}.items():
        assert setting.help
        assert f"# c.GPUBroker.{name} = " in example_config() or f'"{name}": ' in example_config()
        assert setting.example != setting.default_value
