"""Each setting and each key of a pool: its default, the example of the documents, other values that people write, and wrong ones.

One row for each: the parsed default, the parsed example, (wrong value, what the error allows) ..., [(other value, parsed), ...].
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.config import POOL_KEYS, SETTINGS, ConfigError, Settings, load
from fractional_gpu.config.budgets import parse_budgets
from fractional_gpu.config.hub import GroupTerms, Price, hours, price_bands
from fractional_gpu.config.model_servers import SERVERS
from fractional_gpu.config.pools import Pool
from fractional_gpu.core.metering.budgets import Consequence
from fractional_gpu.core.metering.tariffs import Basis
from fractional_gpu.core.model import (
    AfterKernel,
    Breach,
    Compute,
    DeviceSpec,
    Foresight,
    Limits,
    PoolSpec,
    ReserveBy,
    Sharing,
    Strangers,
)
from fractional_gpu.core.units import host_capacity

Row = tuple[Any, ...]
BOOL, TEXT, PATH = "expected True or False", "expected a string", "expected an absolute path such as"
SHARE, PRICE, KWH = (
    "a share from '0.1%' to '100%'",
    "expected a number from 0 to 1000000",
    "a number from 0 to 100000, or",
)
TIME, SIZE = "expected a duration such as 30s, 5m, 2h or 0", "expected a positive size"
FILE, DEVICES, ADDRESS = (
    "expected a size from 1MiB to 1TiB",
    "expected 'all', or a list",
    "expected an IP address and a port",
)
NOTICE, CURRENCY = "expected an absolute path, or an http URL on", "an amount and a currency such as '0.80 EUR'"
LIMITS, BANDS = "expected a dictionary such as {'leases': 4", "prices by time of the week"
HOURS, GROUPS = "is not a time of the week", "expected 'everybody', or groups such as"
OFF, ON = (False, True, ("no", BOOL)), (True, False, ("no", BOOL))
USER = {"user": "*", "limit": "40 GPU hours", "per": "month"}
NIGHTS, WEEK = {"Mon-Fri 08:00-18:00": 1.20}, "Mon-Fri 08:00-18:00, Sat 10:00-14:00"

# fmt: off
BROKER: dict[str, Row] = {
    "state_dir": (None, Path("/var/lib/jupyter-gpu"), ("relative/path", PATH), ("~nobody-of-that-name/x", PATH), ("/with\0nul", PATH),
        [("~/x", Path.home() / "x")]),
    "ledger_limit": (4096, 16_384, ("0MiB", FILE)),
    "idle_exit": (600_000, None, ("0s", "a duration from 1 s to 366 days or 'never'"), (True, "or 'never'"), ("400d", "to 366 days"),
        [(90, 90_000)]),
    "hang_limit": (30_000, 60_000, ("soon", f"{TIME} or 'never'"), [("never", None)]),
    "host_memory": ((500, True), (65_536, False), ("101%", "to '100%'"), ("-1GiB", "expected a percentage"),
        ("half", "expected a percentage such as '50%' or a size such as '64GiB'"),
        [("12.5%", (125, True)), ("100%", (1000, True)), (0, (0, False))]),
    "device_overhead": (None, 500, ("much", SIZE), (True, "expected a size such as '300MiB'"), [("0MiB", 0), (0, 0), ("1.5GiB", 1536)]),
    "lock_timeout": (2000, 5000, (0, "expected a duration from 10 ms"), [("500ms", 500)]),
    "gate_timeout": (2000, 5000, ("1ms", "expected a duration from 10 ms")),
    "checkpoint_deadline": (600_000, 1_200_000, ("10ms", "expected a duration from 1 s"), [("1h", 3_600_000)]),
    "default_pool": ("", "default", ("huge", "there is no such pool; choose one of: default"), (True, TEXT)),
    "default_fraction": (None, 500, ("3/2", "at most 1"), (0.3, "does not offer this fraction; it offers: 1/8, 1/4, 1/2, 3/4, 1"),
        [(0.125, 125), (1, 1000)]),
    "log_level": ("INFO", "DEBUG", ("LOUD", "expected 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"), [("warning", "WARNING")]),
    "devices": (None, ("0", "1"), ([], f"{DEVICES} of device numbers and UUIDs"), ("0", DEVICES), ([-1], "-1 is not a device"),
        ([True], "True is not a device"), ([" "], "' ' is not a device"), ([0.5], "0.5 is not a device"),
        [([0, "1", "GPU-8f6a"], ("0", "1", "GPU-8f6a"))]),
    "device_kind": ("", "example", (True, TEXT)),
    "admin_group": ("", "gpu-admins", (True, TEXT)),
    "account_of_unknown_uids": (None, 65_534, ("no such user", "this host has no such user")),
    "seats_required": OFF,
    "audit_file": (None, Path("/var/log/jupyter-gpu/audit.jsonl"), ("audit.jsonl", f"{PATH} '/var/log/jupyter-gpu/audit.jsonl'")),
    "audit_max_size": (10, 100, (0, FILE), ("2TiB", FILE)),
    "audit_files": (20, 100, (0, "expected a whole number from 1 to 10000"), ("many", "expected a whole number")),
    "audit_keep": (31_536_000_000, 7_776_000_000, ("1m", "expected a duration from 1 h to 366 days or 'forever'"),
        [("1h", 3_600_000), ("forever", None)]),
    "audit_required": ON,
    "revocation_notice": (None, Path("/run/revoked"), ("revoked", "expected an absolute path"),
        ("https://169.254.169.254/a", NOTICE), ("http://169.254.169.253/a", NOTICE), ("http://metadata.google.internal/a", NOTICE),
        ("http://me@127.0.0.1/a", NOTICE), ("http://127.0.0.1:port/a", NOTICE), ("http://127.0.0.1/a b", NOTICE),
        [(url, url) for url in ("http://169.254.169.254/a?b=c", "http://127.0.0.1:8000/a")]),
    "revocation_drains": OFF,
    "revocation_deadline": (30_000, 120_000, ("soon", TIME)),
    "cull_idle_after": (None, 604_800_000, ("soon", TIME), ("1ms", "from 1 s to 366 days or 'never'")),
    "page_out_after": (None, 600_000, ("soon", TIME), ("1ms", "from 1 s to 366 days or 'never'")),
    "cull_above": (100, 90, (0, "a whole number from 1 to 100"), ("90%", "a whole number from 1 to 100")),
    "cull_warning": (900_000, 3_600_000, ("soon", TIME)),
    "yielders": ((), (SERVERS["ollama"], replace(SERVERS["comfyui"], port=8189)), (["llama"], "expected a list of 'ollama'"),
        ("ollama", "expected a list of 'ollama'"), (["ollama=http://192.0.2.7:11434"], "add an http URL on 127.0.0.1")),
    "yield_for_everyone": OFF,
    "metrics_address": (None, ("127.0.0.1", 9464), ("9464", ADDRESS), ("localhost:9464", ADDRESS), ("127.0.0.1:0", ADDRESS),
        ("127.0.0.1:65536", ADDRESS), ("::1:9464", ADDRESS), ("[127.0.0.1]:9464", ADDRESS),
        ("0.0.0.0:9464", "other machines can reach this address; use a loopback"), ("[::]:9464", "c.GPUBroker.metrics_public = True"),
        [("[::1]:1", ("::1", 1))]),
    "metrics_public": OFF,
    "budgets": ((), parse_budgets([USER]), ("much", "a list of at most 1000 budgets, such as")),
    "metrics_users": OFF,
    "carbon": (None, 350.0, *((value, KWH) for value in (-1, 100_001, float("nan"), float("inf"), "co2.csv", "")),
        [(0, 0.0), ("/etc/co2.csv", Path("/etc/co2.csv"))]),
    "usage_visible": ("own", "group", ("everybody", "expected 'own', 'group' or 'all'"), [("all", "all")]),
}
POOL: dict[str, Row] = {
    "devices": (None, ("0", "1"), ("GPU-aa11", DEVICES)),
    "fractions": ((125, 250, 500, 750, 1000), (250, 500, 1000), ([], "expected a list such as ['1/4', '1/2', '1'], or 'any'"),
        ("1/2", "expected a list"), (["2"], "fraction '2' is out of range"), ([None], "expected a fraction such as '1/4'"),
        [("any", ()), (["1", 0.5, "125m", "1/2"], (125, 500, 1000))]),
    "oversubscription": (None, 4000, (0.5, "a number from 1 to 1000 or 'unlimited'"),
        *((value, "or 'unlimited'") for value in (True, "1e999999999", "lots")), [("1", 1000), (2.5, 2500)]),
    "idle_after": ((None, True), (300_000, False), ("soon", f"{TIME} or 'on-demand' or 'auto'"), (None, "or 'on-demand'"),
        [("on-demand", (None, False)), (0, (0, False)), ("auto", (None, True))]),
    "hold_price": (0, 2500, (-1, PRICE)),
    "wait_price": (40_000, 60_000, ("1 EUR", PRICE), [("60", 60_000)]),
    "empty_devices": OFF,
    "foresight": (Foresight.FREE, Foresight.DISPLACE, (True, "expected 'off', 'free' or 'displace'"), [("off", Foresight.OFF)]),
    "foresight_swap": (2000, 500, ("soon", TIME)),
    "foresight_vain": (262_144, 65_536, ("much", SIZE)),
    "min_residency": (10_000, 30_000, ("soon", TIME), [(0, 0)]),
    "unattached_ttl": (120_000, 300_000, (0, "expected a duration from 1 s to 366 days")),
    "revoked_ttl": (86_400_000, 7_200_000, (0, "expected a duration from 1 s to 366 days")),
    "unattached_hold": (15_000, 60_000, ("soon", TIME)),
    "max_unused_hold": (None, 600_000, ("never", f"{TIME} or 'off'")),
    "unattached_leases": (64, 128, (513, "a whole number from 1 to 512")),
    "unattached_share": (500, 1000, (0.5, SHARE)),
    "retry_refused": (30_000, 60_000, ("soon", TIME)),
    "max_passed_over": (8, 4, (2.0, "expected a whole number from 0 to 1000")),
    "may_move": ON,
    "move_busy": OFF,
    "reserve": (ReserveBy.CAP, ReserveBy.USE, ("measured", "expected 'cap' or 'use'"), (["use"], "expected 'cap' or 'use'")),
    "compute": (Compute.SPREAD, Compute.PACK, ("best-fit", "expected 'spread' or 'pack'")),
    "slowdown_bound": (1000, 1500, ("little", "expected a number from 0 to 1000")),
    "headroom": (512, 1024, ("some", "memory 'some' is not a valid size")),
    "min_residency_swaps": (30_000, 9000, (-1, "expected a number from 0 to 1000"), (1001, "expected a number from 0 to 1000")),
    "preempt": ((True, True), (False, True), (True, "expected 'never', 'priorities' or 'fair'"), [("never", (False, False))]),
    "overlap_resume": OFF,
    "max_pin": (14_400_000, 1_800_000, ("on-demand", TIME)),
    "pin_budget": (28_800_000, 7_200_000, (None, "or 'unlimited'"), [("unlimited", None)]),
    "longest_claim": (3_600_000, 600_000, ("unlimited", TIME)),
    "warn_before": (0, 60_000, ("soon", TIME)),
    "max_devices": (8, 2, (9, "expected a whole number from 1 to 8")),
    "max_priority": (0, 10, (1001, "a whole number from -1000 to 1000"), [(-1, -1)]),
    "user_limits": (Limits(), Limits(leases=4, milli=2000, resident_milli=1000), (4, LIMITS),
        ({"gpus": 4}, f"there is no limit named 'gpus'; {LIMITS}"), ({"leases": 1.5}, "'leases' is 1.5; expected a whole number"),
        ({"fraction": -1}, "'fraction' is -1; expected a number of GPUs"), ({"resident": "x"}, "invalid fraction 'x'"),
        [({"resident": "1/2"}, Limits(resident_milli=500))]),
    "group_limits": ((), (("students", Limits(leases=60, resident_milli=2000)),), ([], "expected a dictionary such as {'students'"),
        ({"a": {"leases": True}}, "group 'a': 'leases' is True; expected"), ({"": {}}, "a group's name must have 1 to 200 characters"),
        [({"staff": {}}, (("staff", Limits()),))]),
    "sharing": (Sharing.TIME_SLICE, Sharing.MPS, ("vgpu", "expected 'time-slice', 'mps' or 'mig'"), (["mps"], "expected 'time-slice'"),
        [("mig", Sharing.MIG)]),
    "breach": (Breach.WARN, Breach.SUSPEND, (True, "expected 'warn', 'suspend' or 'kill'"), [("kill", Breach.KILL)]),
    "strangers": (Strangers.YIELD, Strangers.REFUSE, ("kill", "expected 'yield', 'yield-busy', 'ignore' or 'refuse'")),
    "after_kernel": (AfterKernel.KEEP, AfterKernel.END, ("kill", "expected 'keep' or 'end'")),
    "checkpoint_children": OFF,
    "exclusive": OFF,
    "suspend_unseen": (True, False, (1, BOOL)),
    "hami_library": ("", "/usr/local/vgpu/libvgpu.so", ("libvgpu.so", "the absolute path of a library"),
        ("/a:/b", "without spaces or colons")),
    "groups": (None, {"students": GroupTerms(), "staff": GroupTerms(weight=200, priority=10)}, ([], GROUPS), ({}, GROUPS),
        ({"a": {"wieght": 1}}, "invalid terms for group 'a'"), ({"a": {"weight": 0}}, "weight from 1 to 10000"),
        ({"a": {"priority": "high"}}, "priority from -1000 to 1000"), ({7: {}}, "7 is not a group name")),
    "hours": (None, hours(WEEK), ("", "expected 'always'"), ("Mon 08:00-08:00", "opens and closes at the same time"),
        *((value, HOURS) for value in ("weekdays", "Mon 08:00-25:00", "Mox 08:00-09:00"))),
    "price": (None, Price(milli=800, unit="EUR"), *((value, CURRENCY) for value in (0.8, "2.40", "EUR 0.80", "-1 EUR"))),
    "price_hours": ((), price_bands(NIGHTS), ("cheap at night", BANDS), ({"always": 1}, BANDS),
        ({"Mon 08:10-18:00": 1}, "on quarter hours"), ({"Moon 08:00-18:00": 1}, f"'Moon 08:00-18:00' {HOURS}"),
        ({"Mon 08:00-18:00": -1}, f"invalid price -1 for 'Mon 08:00-18:00': {PRICE}"), ({"Mon 08:00-18:00": "1 EUR"}, PRICE)),
    "charge": (Basis.HELD, Basis.RESERVED, *((value, "expected 'reserved', 'held' or 'busy'") for value in ("whole", True)),
        [("busy", Basis.BUSY)]),
    "suspended_credit": (1000, 800, ("101%", SHARE), ("-1%", SHARE)),
    "over_budget": ((Consequence.LOWER_PRIORITY,), (Consequence.WHEN_FREE, Consequence.NO_SEATS),
        *((value, "expected 'lower-priority', 'when-free', 'no-new-seats', 'nothing', or") for value in (
            "", "kill", "lower-priority, when-free", "when-free,when-free", None, ["when-free"])), [("nothing", ())]),
    "wait_target": (30_000, 120_000, ("soon", TIME)),
    "wait_bound": (50, 10, ("0%", SHARE), (0.05, SHARE)),
    "expected_use": (257, 100, ("seldom", SHARE)),
    "when_full": ("wait", "refuse", ("queue", "expected 'wait' or 'refuse'")),
    "kernels_per_seat": (4, 8, (0, "a whole number from 1 to 512")),
}
# fmt: on
TABLES: dict[str, dict[str, Row]] = {"": BROKER, "pool": POOL}
KNOWN = {"": {name: SETTINGS[name] for name in SETTINGS if name != "pools"}, "pool": POOL_KEYS}
EACH = [(kind, name) for kind, settings in KNOWN.items() for name in settings]


def written(kind: str, name: str, value: object) -> dict[str, Any]:
    """Return what a configuration says for this value."""
    if not kind:
        return {name: value}
    return {"pools": {"default": {name: value, **({"price": "1 EUR"} if name == "price_hours" else {})}}}


def read(kind: str, name: str, settings: Settings) -> object:
    return getattr(settings.pools[0] if kind else settings, name)


def spec(pools: dict[str, Any]) -> PoolSpec:
    """Return the pool that the arbiter gets on a host of three devices."""
    devices = [DeviceSpec(device_id=f"GPU-{number}", name="H", memory_mib=81_920) for number in range(3)]
    return load(None, pools).pool_specs(devices)[0]


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_each_default_and_each_value_that_people_write_is_understood_from_a_file_too(
    kind: str, name: str, write: Callable[..., Path]
) -> None:
    default, example, *rest = TABLES[kind][name]
    setting = KNOWN[kind][name]
    assert read(kind, name, load()) == default
    also = rest[-1] if isinstance(rest[-1], list) else []
    for value, parsed in ((setting.default_value, default), (setting.example, example), *also):
        given = written(kind, name, value)
        assert read(kind, name, load(None, given)) == parsed
        ((key, source),) = given.items()
        assert read(kind, name, load(write(f"c.GPUBroker.{key} = {source!r}"))) == parsed


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_each_wrong_value_is_refused_with_its_place_and_what_is_allowed(kind: str, name: str) -> None:
    wrong = [pair for pair in TABLES[kind][name][2:] if isinstance(pair, tuple)]
    assert wrong
    place = f"pools['default'][{name!r}]" if kind else name
    for value, allowed in wrong:
        with pytest.raises(ConfigError) as caught:
            load(None, written(kind, name, value))
        assert str(caught.value).startswith(f"the command line: c.GPUBroker.{place}")
        assert allowed in str(caught.value)


@pytest.mark.parametrize("name", [name for name, setting in POOL_KEYS.items() if setting.to])
def test_each_key_of_a_pool_that_is_for_the_arbiter_reaches_it(name: str) -> None:
    assert spec({}) == PoolSpec(name="default", devices=("GPU-0", "GPU-1", "GPU-2"))
    parsed = POOL[name][1] if len(POOL_KEYS[name].to) > 1 else (POOL[name][1],)
    expected = dict(zip(POOL_KEYS[name].to, parsed, strict=True))
    if name == "devices":
        expected = {"devices": ("GPU-0", "GPU-1")}
    found = spec(written("pool", name, POOL_KEYS[name].example))
    fields = PoolSpec.__dataclass_fields__
    changed = {field: getattr(found, field) for field in fields if getattr(found, field) != getattr(spec({}), field)}
    assert changed
    assert changed.items() <= expected.items()
    assert {field: getattr(found, field) for field in expected} == expected


def test_a_mig_pool_offers_whole_instances() -> None:
    for more in ({}, {"fractions": ["1"]}):
        assert Pool("a", {"sharing": "mig", **more}).fractions == (1000,)
    with pytest.raises(ValueError, match="a kernel gets a whole instance"):
        Pool("a", {"sharing": "mig", "fractions": ["1/2", "1"]})


def test_a_very_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"idle_exit": "x" * 100_000})
    assert len(str(caught.value)) < 500


@given(total_mib=st.integers(0, 10**8), percent=st.integers(1, 100))
def test_a_share_of_host_memory_is_never_more_than_there_is(total_mib: int, percent: int) -> None:
    budget = load(None, {"host_memory": f"{percent}%"}).host_budget_mib(total_mib)
    assert budget * 100 <= total_mib * percent < (budget + 1) * 100


@given(total_mib=st.integers(0, 10**8), size_mib=st.integers(0, 10**8))
def test_a_size_of_host_memory_is_never_more_than_there_is(total_mib: int, size_mib: int) -> None:
    assert load(None, {"host_memory": f"{size_mib}MiB"}).host_budget_mib(total_mib) == min(total_mib, size_mib)


def test_the_overhead_goes_by_the_kind_of_device_unless_it_is_set() -> None:
    assert (load().overhead_mib(simulated=False), load().overhead_mib(simulated=True)) == (556, 0)
    settings = load(None, {"device_overhead": "50MiB"})
    assert {settings.overhead_mib(simulated=simulated) for simulated in (False, True)} == {50}


def test_the_only_pool_is_the_default_one_and_its_smallest_fraction_the_default() -> None:
    settings = load(None, {"pools": {"lab": {"fractions": ["1", "1/2"]}}})
    assert (settings.first_pool.name, settings.first_fraction) == ("lab", 500)


def test_a_pool_that_takes_any_fraction_has_the_usual_default() -> None:
    settings = load(None, {"pools": {"default": {"fractions": "any"}}})
    assert settings.first_fraction == load().first_fraction == 250
    assert load(None, {"pools": {"default": {"fractions": "any"}}, "default_fraction": "0.3"}).first_fraction == 300


def test_of_several_pools_one_must_be_the_default() -> None:
    pools = {"a": {}, "b": {"devices": [0]}}
    with pytest.raises(
        ConfigError, match=r"no pool is called 'default'; set c\.GPUBroker\.default_pool to one of a, b$"
    ):
        load(None, {"pools": pools})
    assert load(None, {"pools": pools, "default_pool": "b"}).default_pool == "b"


def test_an_address_that_others_reach_is_allowed_where_that_is_meant() -> None:
    given = {"metrics_address": "192.0.2.7:9464", "metrics_public": True}
    assert load(None, given).metrics_address == ("192.0.2.7", 9464)


def test_host_memory_is_told_as_a_number_of_suspended_kernels() -> None:
    assert host_capacity(131_072, 81_920, 250) == "room for 6 that filled 1/4 of a GPU, 20 GiB each"
