"""The example can be used as it is, and with everything in it switched on; it explains every setting."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from fractional_gpu.config import GPUBroker, Settings, example_config, load
from fractional_gpu.config.pools import KEYS
from fractional_gpu.core.model import PoolSpec

Write = Callable[..., Path]


def _switched_on(text: str) -> str:
    """Remove the help and the comment signs before settings."""
    lines = (line for line in text.splitlines() if not line.startswith("##"))
    return "\n".join(re.sub(r"^# (?=c\.|    |})", "", line) for line in lines)


def test_the_example_loads_and_changes_nothing(write: Write) -> None:
    file = write(example_config())
    settings, defaults = load(file), load()
    assert [name for name in _names() if getattr(settings, name) != getattr(defaults, name)] == ["files"]


def test_everything_in_the_example_can_be_switched_on(write: Write) -> None:
    settings, defaults = load(write(_switched_on(example_config()))), load()
    changed = {name for name in _names() if getattr(settings, name) != getattr(defaults, name)}
    # The examples of the default pool and of the pools are their defaults; "where" is the place of a key, not its value.
    assert changed == set(_names()) - {"default_pool"}
    pairs = zip(settings.pools, defaults.pools, strict=True)
    assert all(one.devices == other.devices and one.policy == other.policy for one, other in pairs)


def _names() -> list[str]:
    return [field.name for field in fields(Settings)]


@pytest.mark.parametrize("name", sorted(GPUBroker.class_traits(config=True)))
def test_every_setting_has_help_and_an_example_and_is_in_the_example(name: str) -> None:
    trait = GPUBroker.class_traits(config=True)[name]
    assert trait.help
    assert "example" in trait.metadata
    assert f"# c.GPUBroker.{name} = " in example_config()


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_of_a_pool_is_explained_and_its_example_can_be_used(key: str, write: Write) -> None:
    assert f'"{key}": ' in example_config()
    assert KEYS[key].help
    assert KEYS[key].example != KEYS[key].default
    load(write(f"c.GPUBroker.pools = {{'default': {{{key!r}: {KEYS[key].example!r}}}}}"))


def test_the_keys_of_a_pool_are_those_that_the_arbiter_knows() -> None:
    keys = [field for rule in KEYS.values() for field in (rule.field, *rule.also)]
    assert sorted([*keys, "name"]) == sorted(field.name for field in fields(PoolSpec))
