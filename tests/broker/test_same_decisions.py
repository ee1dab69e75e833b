"""The broker and the simulator decide alike: the other's arbiter answers one's recorded events with the same effects.

Each builds its arbiter as in production, from the same configuration file. A broker that chose devices by other rules than the
simulator's would fail.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.broker.process.driver_start import Backend
from fractional_gpu.broker.process.run import configuration, device_specs
from fractional_gpu.commands.main import main
from fractional_gpu.config import load
from fractional_gpu.core import events
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect, Granted, Resume
from fractional_gpu.core.events import Event
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.gpu.interface import DeviceInfo, Monitor
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.record import digest, recording, replay
from tests.broker.driver import Driver, swaps_of
from tests.broker.live import live_broker

pytestmark = pytest.mark.promise("same-decisions")

Placed = tuple[str, tuple[str, ...]]
"""A lease, and the devices it was given."""

CONFIG = """
c.GPUBroker.default_pool = "default"
c.GPUBroker.pools = {"default": {"compute": "%s", "fractions": ["1/8", "1/4", "1/2", "3/4", "1"]}}
"""
LOADS = {
    "fractions": "--users 16 --set several_gpus=0 --devices 3x80GiB --set pace=short",
    "whole devices beside fractions": "--users 12 --set several_gpus=40 --devices 9x80GiB",
}


def _placed(effects: Sequence[Effect]) -> Iterator[Placed]:
    for effect in effects:
        if isinstance(effect, (Granted, Resume)):
            yield effect.lease_id, effect.device_ids


def _recorded(path: Path) -> Iterator[tuple[Event, str]]:
    """Return the recorded events, each with the digest of the simulator's answer."""
    for line in path.read_text().splitlines()[1:]:
        entry = json.loads(line)
        if "event" in entry:
            yield msgspec.convert(entry["fields"], getattr(events, entry["event"])), entry["digest"]


def _simulated(folder: Path, load: str, compute: str) -> Path:
    (folder / "gpu_config.py").write_text(CONFIG % compute)
    run = folder / "run.log"
    command = ["simulate", *load.split(), "--policy", str(folder / "gpu_config.py"), "--json", "--set", f"record={run}"]
    assert main(command) == 0
    return run


def _machine(run: Path) -> tuple[DeviceSpec, ...]:
    (host,) = json.loads(run.read_text().splitlines()[0])["hosts"]
    return tuple(DeviceSpec(**fields) for fields in host["devices"])


def _backend(devices: Sequence[DeviceSpec]) -> Backend:
    """The same devices as a broker's backend finds them."""
    found = [
        DeviceInfo(
            device_id=one.device_id,
            index=number,
            name=one.name,
            memory_mib=one.memory_mib,
            simulated=True,
            checkpointable=True,
        )
        for number, one in enumerate(devices)
    ]
    return Backend(name="simulated:", monitor=cast("Monitor", Driver()), devices=tuple(found), folder=None)


async def _answers(broker: Broker, run: Path) -> tuple[list[str], list[str], list[Placed]]:
    """Pass the recorded events to the broker; return the recorded digests, those of its answers, and the placements.

    The broker is stopping, so it carries no swap out: all results are among the events. Its loop does not run meanwhile, so its own
    alarm adds no event.
    """
    broker.stopping = True
    expected, given, placed = [], [], list[Placed]()
    for event, recorded in _recorded(run):
        effects = broker.dispatch(event)
        expected.append(recorded)
        given.append(digest(effects))
        placed += _placed(effects)
    return expected, given, placed


async def _broker_of(folder: Path) -> Broker:
    driver = Driver()
    writer = LedgerWriter(Ledger.open(folder / "ledger.sqlite"))
    return Broker(Arbiter(), cast("Monitor", driver), swaps_of(driver), writer)


@pytest.mark.parametrize(("load", "compute"), list(zip(LOADS, ["pack", "spread"], strict=True)))
async def test_a_broker_decides_as_the_simulation_that_was_recorded(
    tmp_path: Path, load: str, compute: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _simulated(tmp_path, LOADS[load], compute)
    capsys.readouterr()
    broker = await _broker_of(tmp_path)
    try:
        expected, given, placed = await _answers(broker, run)
    finally:
        await broker.close()
    assert given == expected
    assert len({device_ids for _, device_ids in placed}) >= 3, "there were devices to choose from"
    assert len(placed) >= 30


def test_a_broker_is_configured_as_the_simulator_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _simulated(tmp_path, "--users 2 --set several_gpus=0 --devices 3x80GiB,1x40GiB", "spread")
    capsys.readouterr()
    settings, devices = load(tmp_path / "gpu_config.py", {}), _machine(run)
    backend = _backend(devices)
    managed = device_specs(settings, backend)
    everything = [
        DeviceSpec(device_id=one.device_id, name=one.name, memory_mib=one.memory_mib) for one in backend.devices
    ]
    events = list(configuration(settings, everything, managed, host_budget_mib=1 << 20))
    simulated = [event for event, _ in _recorded(run)][: len(events)]
    assert sorted(map(repr, (replace(event, at_ms=0) for event in events))) == sorted(map(repr, simulated))


def test_what_a_broker_decided_is_replayed_by_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels have no gate, so each gets its device before it starts; they have several sizes, and come and go."""
    handled: list[tuple[Event, list[Effect]]] = []
    handle = Arbiter.handle

    def noted(arbiter: Arbiter, event: Event) -> list[Effect]:
        handled.append((event, effects := handle(arbiter, event)))
        return effects

    monkeypatch.setattr(Arbiter, "handle", noted)
    pools: dict[str, Any] = {"default": {"unattached_leases": 512, "unattached_share": "100%", "compute": "pack"}}
    with live_broker("3x1GiB", pools=pools) as live:
        leases = [live.lease(fraction_milli=milli, gated=False) for milli in (500, 125, 250, 125, 500, 250, 125, 750)]
        for lease in leases[1::2]:
            live.call("DELETE", f"/v1/leases/{lease.lease_id}", token=lease.token)
        for milli in (125, 125, 250, 125):
            live.lease(fraction_milli=milli, gated=False)
    placed = [one for _, effects in handled for one in _placed(effects)]
    assert len(placed) == 12
    assert len({device_ids for _, device_ids in placed}) == 3
    with recording(tmp_path / "broker.log", Host(devices=(), pools=()), []) as log:
        assert log is not None
        for event, effects in handled:
            log.event(0, event, effects)
    monkeypatch.undo()
    assert replay(tmp_path / "broker.log") == (len(handled), sum(len(effects) for _, effects in handled))
