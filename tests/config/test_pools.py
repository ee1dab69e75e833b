"""A pool's policy is understood or refused, and every device is in one pool at most."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.config import ConfigError, load
from fractional_gpu.core.model import DeviceSpec, Foresight, Limits, PoolSpec, ReserveBy

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


def test_every_key_reaches_the_arbiter() -> None:
    policy = {
        "devices": [2, "GPU-aa11"],
        "fractions": ["1", 0.5, "125m", "1/2"],
        "oversubscription": 2.5,
        "idle_after": "90s",
        "hold_price": 2.5,
        "wait_price": "60",
        "empty_devices": True,
        "foresight": "displace",
        "foresight_swap": "500ms",
        "foresight_vain": "64GiB",
        "min_residency": 0,
        "unattached_ttl": "1m",
        "retry_refused": "1s",
        "max_passed_over": 3,
        "may_move": True,
        "move_busy": True,
        "reserve": "use",
        "headroom": "1GiB",
        "min_residency_swaps": 2.5,
        "preempt": "fair",
        "overlap_resume": True,
        "max_pin": "30m",
        "pin_budget": "2h",
        "warn_before": "1m",
        "max_devices": 2,
        "max_priority": 5,
        "user_limits": {"leases": 4, "fraction": 2, "resident": "1/2"},
        "group_limits": {"staff": {}, "students": {"leases": 60, "resident": 1.5}},
    }
    assert _specs({"lab": policy})["lab"] == PoolSpec(
        name="lab",
        devices=("GPU-aa11", "GPU-bb33"),
        fractions_milli=(125, 500, 1000),
        oversubscription_milli=2500,
        idle_after_ms=90_000,
        idle_auto=False,
        hold_price_milli=2500,
        wait_price_milli=60_000,
        empty_devices=True,
        foresight=Foresight.DISPLACE,
        foresight_swap_ms=500,
        foresight_vain_mib=65_536,
        min_residency_ms=0,
        unattached_ttl_ms=60_000,
        retry_refused_ms=1000,
        max_passed_over=3,
        may_move=True,
        move_busy=True,
        reserve_by=ReserveBy.USE,
        headroom_mib=1024,
        min_residency_swaps_milli=2500,
        preempt_equals=True,
        preempt_priorities=True,
        overlap_resume=True,
        max_pin_ms=1_800_000,
        pin_budget_ms=7_200_000,
        warn_before_ms=60_000,
        max_devices=2,
        max_priority=5,
        user_limits=Limits(leases=4, milli=2000, resident_milli=500),
        group_limits=(("staff", Limits()), ("students", Limits(leases=60, resident_milli=1500))),
    )


def test_words_stand_for_policies_without_a_number() -> None:
    assert _specs({"a": {"pin_budget": "unlimited"}})["a"].pin_budget_ms is None
    never = _specs({"a": {"preempt": "never"}})["a"]
    assert (never.preempt_equals, never.preempt_priorities) == (False, False)
    spec = _specs({"a": {"idle_after": "on-demand", "oversubscription": "unlimited", "fractions": "any"}})["a"]
    assert (spec.idle_after_ms, spec.oversubscription_milli, spec.fractions_milli) == (None, None, ())
    assert _specs({"a": {"idle_after": 0, "oversubscription": "1"}})["a"].oversubscription_milli == 1000
    assert _specs({"a": {"idle_after": 0}})["a"].idle_after_ms == 0
    assert not spec.idle_auto
    assert _specs({"a": {"idle_after": "auto"}})["a"].idle_auto


@pytest.mark.parametrize(
    ("policy", "key", "allowed"),
    [
        (
            {"idel_after": "5m"},
            "idel_after",
            "unknown key; did you mean 'idle_after'? Allowed: after_kernel, breach, charge, compute, devices, ",
        ),
        ({3: 4}, "3", "unknown key; Allowed: after_kernel, breach, charge, compute, devices, "),
        ({"idle_after": "soon"}, "idle_after", "allowed: a duration such as 30s, 5m, 2h or 0 or 'on-demand' or 'auto'"),
        ({"hold_price": -1}, "hold_price", "allowed: a number from 0 to 1000000"),
        ({"wait_price": "1 EUR"}, "wait_price", "allowed: a number from 0 to 1000000"),
        ({"foresight": True}, "foresight", "allowed: 'off', 'free' or 'displace'"),
        ({"idle_after": None}, "idle_after", "expected a duration such as '30s', '5m' or '2h' or 'on-demand'"),
        ({"fractions": []}, "fractions", "expected a list such as ['1/4', '1/2', '1'], or 'any'"),
        ({"fractions": "1/2"}, "fractions", "expected a list such as"),
        ({"fractions": ["2"]}, "fractions", "fraction '2' is out of range"),
        ({"fractions": [None]}, "fractions", "expected a fraction such as '1/4'"),
        (
            {"oversubscription": 0.5},
            "oversubscription",
            "a number from 1 to 1000 or 'unlimited'",
        ),
        ({"oversubscription": True}, "oversubscription", "or 'unlimited'"),
        ({"oversubscription": "1e999999999"}, "oversubscription", "or 'unlimited'"),
        ({"oversubscription": "lots"}, "oversubscription", "or 'unlimited'"),
        ({"unattached_ttl": 0}, "unattached_ttl", "allowed: from 1 s to 366 days"),
        ({"max_passed_over": 2.0}, "max_passed_over", "allowed: a whole number from 0 to 1000"),
        ({"may_move": "no"}, "may_move", "allowed: True or False"),
        ({"devices": "GPU-aa11"}, "devices", "allowed: 'all', or a list"),
        ({"reserve": "measured"}, "reserve", "allowed: 'cap' or 'use'"),
        ({"reserve": ["use"]}, "reserve", "allowed: 'cap' or 'use'"),
        ({"compute": "best-fit"}, "compute", "allowed: 'spread' or 'pack'"),
        ({"slowdown_bound": "little"}, "slowdown_bound", "allowed: a number from 0 to 1000"),
        ({"headroom": "some"}, "headroom", "memory 'some' is not a size"),
        ({"min_residency_swaps": -1}, "min_residency_swaps", "allowed: a number from 0 to 1000"),
        ({"min_residency_swaps": 1001}, "min_residency_swaps", "allowed: a number from 0 to 1000"),
        ({"preempt": True}, "preempt", "allowed: 'never', 'priorities' or 'fair'"),
        ({"max_pin": "on-demand"}, "max_pin", "allowed: a duration such as 30s, 5m, 2h or 0"),
        ({"pin_budget": None}, "pin_budget", "or 'unlimited'"),
        ({"max_devices": 9}, "max_devices", "allowed: a whole number from 1 to 8"),
        ({"user_limits": 4}, "user_limits", "allowed: a dictionary such as {'leases': 4"),
        ({"user_limits": {"gpus": 4}}, "user_limits", "there is no limit 'gpus'; allowed: a dictionary"),
        ({"user_limits": {"leases": 1.5}}, "user_limits", "'leases' is 1.5; allowed: a whole number"),
        ({"user_limits": {"fraction": -1}}, "user_limits", "'fraction' is -1; allowed: a number of GPUs"),
        ({"user_limits": {"resident": "x"}}, "user_limits", "fraction 'x' is not a fraction"),
        ({"group_limits": {"a": {"leases": True}}}, "group_limits", "group 'a': 'leases' is True; allowed"),
        ({"group_limits": {"": {}}}, "group_limits", "a group's name has 1 to 200 characters"),
        ({"group_limits": []}, "group_limits", "allowed: a dictionary such as {'students'"),
    ],
)
def test_a_bad_policy_names_the_pool_the_key_and_what_is_allowed(policy: object, key: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"pools": {"default": policy}})
    shown = key if key == "3" else repr(key)
    assert str(caught.value).startswith(f"the command line: c.GPUBroker.pools['default'][{shown}] = ")
    assert allowed in str(caught.value)


def test_a_pool_is_a_dictionary() -> None:
    with pytest.raises(ConfigError, match=r"pools\['default'\] = '5m': a pool is a dictionary such as"):
        load(None, {"pools": {"default": "5m"}})


@pytest.mark.parametrize("name", ["", "Lab", "a b", "-a", "a-", "a/b", "x" * 64, "é"])
def test_a_pool_name_must_fit_into_a_kernelspec_name(name: str) -> None:
    with pytest.raises(ConfigError, match="a pool's name has 1 to 63 small letters, digits"):
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
        ("GPU-aa", "fits more than one device; this host has: 0 GPU-aa11"),
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
    with pytest.raises(ConfigError, match=r"pools\['b'\]\['devices'\] = '0': GPU-aa11 is in pool 'a' already"):
        _specs({"a": {"devices": ["GPU-aa11"]}, "b": {"devices": [0]}})
    with pytest.raises(ConfigError, match="GPU-aa11 is in pool 'a' already"):
        _specs({"a": {"devices": [0, "GPU-aa11"]}})
    with pytest.raises(
        ConfigError, match=r"pools\['b'\]\['devices'\] = 'all': pool 'a' has 'all' already \(it is the default"
    ):
        _specs({"a": {}, "b": {}})


def test_a_pool_without_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pools\['rest'\]: the pool has no devices: other pools have all 4"):
        _specs({"rest": {}, "a": {"devices": [0, 1, 2, 3]}})


def test_a_host_without_devices_has_an_empty_pool_but_no_listed_ones() -> None:
    assert _specs({"default": {}}, devices=())["default"].devices == ()
    with pytest.raises(ConfigError, match="there is no such device; this host has: none at all"):
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
        ({"default": {"devices": ["model:B200"]}}, "no device of that model; this host has: NVIDIA A100-SXM4-40GB, "),
        ({"default": {"devices": ["model:"]}}, "no device of that model"),
        ({"a": {"devices": ["model:A100"]}, "b": {"devices": [0]}}, "is in pool 'a' already"),
    ],
)
def test_a_model_that_is_not_there_or_taken_is_named(pools: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _specs(pools, _models())
