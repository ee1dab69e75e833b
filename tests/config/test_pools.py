"""A pool's policy is understood or refused, and every device is in one pool at most."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.config import ConfigError, load
from fractional_gpu.core.model import DeviceSpec, PoolSpec

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-bb3")


def _devices(count: int = 4) -> tuple[DeviceSpec, ...]:
    return tuple(DeviceSpec(device_id=UUIDS[number], name="H", memory_mib=81_920) for number in range(count))


def _specs(
    pools: dict[str, Any], devices: Sequence[DeviceSpec] | None = None, managed: object = "all"
) -> dict[str, PoolSpec]:
    overrides = {"pools": pools, "default_pool": next(iter(pools)), "devices": managed}
    specs = load(None, overrides).pool_specs(_devices() if devices is None else devices)
    return {spec.name: spec for spec in specs}


def test_a_pool_of_defaults_is_cores_default_pool_with_all_devices() -> None:
    assert _specs({"default": {}}) == {"default": PoolSpec(name="default", devices=UUIDS)}


@pytest.mark.parametrize(
    ("policy", "key", "allowed"),
    [
        (
            {"idel_after": "5m"},
            "idel_after",
            "unknown key; did you mean 'idle_after'? Allowed: after_kernel, breach, charge, checkpoint_children, compute, ",
        ),
        ({3: 4}, "3", "unknown key; Allowed: after_kernel, breach, charge, checkpoint_children, compute, "),
    ],
)
def test_an_unknown_key_names_the_pool_and_the_keys_there_are(policy: object, key: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"pools": {"default": policy}})
    shown = key if key == "3" else repr(key)
    assert str(caught.value).startswith(f"the command line: c.GPUBroker.pools['default'][{shown}] = ")
    assert allowed in str(caught.value)


def test_a_pool_is_a_dictionary() -> None:
    with pytest.raises(ConfigError, match=r"pools\['default'\] = '5m': a pool must be a dictionary such as"):
        load(None, {"pools": {"default": "5m"}})


@pytest.mark.parametrize("name", ["", "Lab", "a b", "-a", "a-", "a/b", "x" * 64, "é"])
def test_a_pool_name_must_fit_into_a_kernelspec_name(name: str) -> None:
    with pytest.raises(ConfigError, match="a pool name must be 1 to 63 lowercase letters, digits"):
        load(None, {"pools": {name: {}}})


def test_devices_are_found_by_number_uuid_or_a_clear_beginning() -> None:
    specs = _specs({"a": {"devices": ["GPU-bb3"]}, "b": {"devices": ["1"]}, "c": {"devices": ["GPU-aa1"]}})
    assert {name: spec.devices for name, spec in specs.items()} == {
        "a": ("GPU-bb3",),
        "b": ("GPU-aa22",),
        "c": ("GPU-aa11",),
    }


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        (4, "there is no such device; this host has: 0 GPU-aa11, 1 GPU-aa22, 2 GPU-bb33, 3 GPU-bb3"),
        ("GPU-cc", "there is no such device; this host has: 0 GPU-aa11"),
        ("GPU-aa", "matches more than one device; this host has: 0 GPU-aa11"),
    ],
)
def test_an_unknown_device_is_refused_with_those_there_are(reference: object, problem: str) -> None:
    settings = load(None, {"pools": {"default": {"devices": [reference]}}})
    with pytest.raises(ConfigError) as caught:
        settings.pool_specs(_devices())
    assert str(caught.value).startswith(
        f"the command line: c.GPUBroker.pools['default']['devices'] = {str(reference)!r}: "
    )
    assert problem in str(caught.value)


def test_a_device_is_in_one_pool() -> None:
    with pytest.raises(ConfigError, match=r"pools\['b'\]\['devices'\] = '0': GPU-aa11 is already in pool 'a'"):
        _specs({"a": {"devices": ["GPU-aa11"]}, "b": {"devices": [0]}})
    with pytest.raises(ConfigError, match="GPU-aa11 is already in pool 'a'"):
        _specs({"a": {"devices": [0, "GPU-aa11"]}})
    with pytest.raises(
        ConfigError, match=r"pools\['b'\]\['devices'\] = 'all': pool 'a' already has 'all' \(the default"
    ):
        _specs({"a": {}, "b": {}})


def test_a_pool_without_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pools\['rest'\]: the pool has no devices, because other pools have all 4"):
        _specs({"rest": {}, "a": {"devices": [0, 1, 2, 3]}})


def test_a_host_without_devices_has_an_empty_pool_but_no_listed_ones() -> None:
    assert _specs({"default": {}}, devices=())["default"].devices == ()
    with pytest.raises(ConfigError, match="there is no such device; this host has: no devices"):
        _specs({"a": {"devices": [0]}}, devices=())


def test_devices_that_are_not_managed_are_in_no_pool() -> None:
    assert _specs({"default": {}}, managed=[3, 1])["default"].devices == ("GPU-aa22", "GPU-bb3")
    with pytest.raises(ConfigError, match=r"GPU-aa11 is not among the devices that c\.GPUBroker\.devices allows"):
        _specs({"a": {"devices": [0]}}, managed=[1])
    settings = load(None, {"devices": [7]})
    with pytest.raises(ConfigError, match=r"c\.GPUBroker\.devices = '7': there is no such device"):
        settings.managed(_devices())


@given(owners=st.lists(st.sampled_from(["a", "b", "rest"]), max_size=4))
def test_the_pool_of_the_rest_gets_exactly_what_the_others_left(owners: list[str]) -> None:
    devices = _devices(len(owners))
    listed = {name: [number for number, owner in enumerate(owners) if owner == name] for name in ("a", "b")}
    pools: dict[str, Any] = {"rest": {}} | {name: {"devices": mine} for name, mine in listed.items() if mine}
    if owners and "rest" not in owners:
        with pytest.raises(ConfigError, match="the pool has no devices"):
            _specs(pools, devices)
        return
    specs = _specs(pools, devices)
    counted = Counter(device for spec in specs.values() for device in spec.devices)
    assert counted == Counter(device.device_id for device in devices)
    for spec in specs.values():
        assert [UUIDS.index(device) for device in spec.devices] == [
            n for n, owner in enumerate(owners) if owner == spec.name
        ]


def _models() -> tuple[DeviceSpec, ...]:
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB")
    return tuple(DeviceSpec(device_id=UUIDS[number], name=name, memory_mib=81_920) for number, name in enumerate(names))


def test_a_pool_may_have_all_devices_of_a_model() -> None:
    specs = _specs({"big": {"devices": ["model:a100"]}, "rest": {}}, _models())
    assert specs["big"].devices == (UUIDS[0], UUIDS[2])
    assert specs["rest"].devices == (UUIDS[1],)
    assert _specs({"default": {}}, _models(), managed=["model:H100"])["default"].devices == (UUIDS[1],)


@pytest.mark.parametrize(
    ("pools", "problem"),
    [
        (
            {"default": {"devices": ["model:B200"]}},
            "no device matches that model; this host has: NVIDIA A100-SXM4-40GB, ",
        ),
        ({"default": {"devices": ["model:"]}}, "no device matches that model"),
        ({"a": {"devices": ["model:A100"]}, "b": {"devices": [0]}}, "is already in pool 'a'"),
    ],
)
def test_a_model_that_is_not_there_or_taken_is_named(pools: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _specs(pools, _models())
