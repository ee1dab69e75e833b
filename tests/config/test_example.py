"""The example works unchanged, and with everything in it switched on; it explains every setting."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_has_help_and_an_example_and_is_in_the_example(name: str) -> None:
    assert SETTINGS[name].help
    assert f"# c.GPUBroker.{name} = " in example_config()


@pytest.mark.parametrize("key", sorted(POOL_KEYS))
def test_every_key_of_a_pool_is_explained_and_its_example_can_be_used(key: str, write: Write) -> None:
    assert f'"{key}": ' in example_config()
    setting = POOL_KEYS[key]
    assert setting.help
    assert setting.example != setting.default_value
    more = {"price": "1 EUR"} if key == "price_hours" else {}
    load(write(f"c.GPUBroker.pools = {{'default': { ({key: setting.example, **more})!r}}}"))
