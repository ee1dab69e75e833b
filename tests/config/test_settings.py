"""Values become checked integers; invalid ones are refused with what is allowed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.config import ConfigError, load


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("state_dir", "/var/lib/x", Path("/var/lib/x")),
        ("state_dir", "~/x", Path.home() / "x"),
        ("idle_exit", "never", None),
        ("idle_exit", 90, 90_000),
        ("host_memory", "12.5%", (125, True)),
        ("host_memory", "100%", (1000, True)),
        ("host_memory", "64GiB", (65_536, False)),
        ("host_memory", 0, (0, False)),
        ("device_overhead", "0MiB", 0),
        ("device_overhead", 0, 0),
        ("device_overhead", "1.5GiB", 1536),
        ("lock_timeout", "500ms", 500),
        ("gate_timeout", "1s", 1000),
        ("checkpoint_deadline", "1h", 3_600_000),
        ("default_fraction", "1/2", 500),
        ("default_fraction", 0.125, 125),
        ("default_fraction", 1, 1000),
        ("default_pool", "default", "default"),
        ("log_level", "warning", "WARNING"),
        ("devices", [0, "1", "GPU-8f6a"], ("0", "1", "GPU-8f6a")),
        ("devices", "all", None),
        ("audit_file", "/var/log/audit", Path("/var/log/audit")),
        ("audit_max_size", "1GiB", 1024),
        ("ledger_limit", "16GiB", 16_384),
        ("audit_files", 3, 3),
        ("audit_keep", "1h", 3_600_000),
        ("audit_keep", "forever", None),
        ("audit_required", False, False),
        ("metrics_address", "127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("metrics_address", "[::1]:1", ("::1", 1)),
        ("metrics_address", "", None),
        ("revocation_notice", "", None),
        ("revocation_notice", "/run/revoked", Path("/run/revoked")),
        ("revocation_notice", "http://169.254.169.254/a?b=c", "http://169.254.169.254/a?b=c"),
        ("revocation_notice", "http://127.0.0.1:8000/a", "http://127.0.0.1:8000/a"),
        ("revocation_deadline", "2m", 120_000),
    ],
)
def test_what_people_write_is_translated(name: str, value: object, expected: object) -> None:
    assert getattr(load(None, {name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("state_dir", "relative/path", "allowed: an absolute path such as"),
        ("state_dir", "~nobody-of-that-name/x", "allowed: an absolute path such as"),
        ("state_dir", "/with\0nul", "allowed: an absolute path such as"),
        ("idle_exit", "0s", "allowed: from 1 s to 366 days or 'never'"),
        ("idle_exit", True, "or 'never'"),
        ("idle_exit", "400d", "allowed: from 1 s to 366 days"),
        ("host_memory", "101%", "allowed: at most 100%"),
        ("host_memory", "half", "expected a percentage such as '50%' or a size such as '64GiB'"),
        ("host_memory", "-1GiB", "expected a percentage"),
        ("device_overhead", "much", "allowed: a positive size"),
        ("device_overhead", True, "expected a size such as '300MiB'"),
        ("lock_timeout", 0, "allowed: from 10 ms"),
        ("gate_timeout", "1ms", "allowed: from 10 ms"),
        ("checkpoint_deadline", "10ms", "allowed: from 1 s"),
        ("default_fraction", "3/2", "at most 1"),
        ("default_fraction", 0.3, "pool 'default' does not offer it; it offers: 1/8, 1/4, 1/2, 3/4, 1"),
        ("default_pool", "huge", "there is no such pool; allowed: default"),
        ("log_level", "LOUD", "allowed: 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        ("devices", [], "allowed: 'all', or a list of device numbers and UUIDs"),
        ("devices", "0", "allowed: 'all', or a list"),
        ("devices", [-1], "-1 is not a device"),
        ("devices", [True], "True is not a device"),
        ("devices", [" "], "' ' is not a device"),
        ("devices", [0.5], "0.5 is not a device"),
        ("pools", {}, "there must be a pool"),
        ("audit_file", "audit.jsonl", "allowed: an absolute path such as '/var/log/jupyter-gpu/audit.jsonl'"),
        ("audit_max_size", 0, "allowed: from 1MiB to 1TiB"),
        ("audit_max_size", "2TiB", "allowed: from 1MiB to 1TiB"),
        ("ledger_limit", "0MiB", "allowed: from 1MiB to 1TiB"),
        ("audit_files", 0, "allowed: a whole number from 1 to 10000"),
        ("audit_files", "many", "allowed: a whole number"),
        ("audit_keep", "1m", "allowed: from 1 h to 366 days or 'forever'"),
        ("audit_required", "no", "allowed: True or False"),
        ("revocation_notice", "revoked", "allowed: an absolute path"),
        ("revocation_notice", "https://169.254.169.254/a", "allowed: an absolute path, or a URL such as"),
        ("revocation_notice", "http://169.254.169.253/a", "allowed: an absolute path, or a URL such as"),
        ("revocation_notice", "http://metadata.google.internal/a", "allowed: an absolute path, or a URL such as"),
        ("revocation_notice", "http://me@127.0.0.1/a", "allowed: an absolute path, or a URL such as"),
        ("revocation_notice", "http://127.0.0.1:port/a", "allowed: an absolute path, or a URL such as"),
        ("revocation_notice", "http://127.0.0.1/a b", "allowed: an absolute path, or a URL such as"),
        ("metrics_address", "9464", "allowed: an IP address and a port"),
        ("metrics_address", "localhost:9464", "allowed: an IP address and a port"),
        ("metrics_address", "127.0.0.1:0", "allowed: an IP address and a port"),
        ("metrics_address", "127.0.0.1:65536", "allowed: an IP address and a port"),
        ("metrics_address", "::1:9464", "allowed: an IP address and a port"),
        ("metrics_address", "[127.0.0.1]:9464", "allowed: an IP address and a port"),
        ("metrics_address", "0.0.0.0:9464", "other machines reach this address; use a loopback one"),
        ("metrics_address", "[::]:9464", "c.GPUBroker.metrics_public = True"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {name: value})
    message = str(caught.value)
    assert message.startswith(f"the command line: c.GPUBroker.{name}")
    assert allowed in message


def test_a_very_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"idle_exit": "x" * 100_000})
    assert len(str(caught.value)) < 500


@given(total_mib=st.integers(0, 10**8), percent=st.integers(0, 100))
def test_a_share_of_host_memory_is_never_more_than_there_is(total_mib: int, percent: int) -> None:
    budget = load(None, {"host_memory": f"{percent}%"}).host_budget_mib(total_mib)
    assert budget * 100 <= total_mib * percent < (budget + 1) * 100


@given(total_mib=st.integers(0, 10**8), size_mib=st.integers(0, 10**8))
def test_a_size_of_host_memory_is_never_more_than_there_is(total_mib: int, size_mib: int) -> None:
    assert load(None, {"host_memory": f"{size_mib}MiB"}).host_budget_mib(total_mib) == min(total_mib, size_mib)


def test_the_overhead_goes_by_the_kind_of_device_unless_it_is_set() -> None:
    assert (load().overhead_mib(80_000, simulated=False), load().overhead_mib(80_000, simulated=True)) == (1900, 0)
    assert load().overhead_mib(8_000, simulated=False) == 556, "a margin of 256 MiB at least"
    settings = load(None, {"device_overhead": "50MiB"})
    assert {settings.overhead_mib(80_000, simulated=simulated) for simulated in (False, True)} == {50}


def test_the_only_pool_is_the_default_one_and_its_smallest_fraction_the_default() -> None:
    settings = load(None, {"pools": {"lab": {"fractions": ["1", "1/2"]}}})
    assert (settings.first_pool.name, settings.first_fraction) == ("lab", 500)


def test_a_pool_that_takes_any_fraction_has_the_usual_default() -> None:
    settings = load(None, {"pools": {"default": {"fractions": "any"}}})
    assert settings.first_fraction == 250
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
