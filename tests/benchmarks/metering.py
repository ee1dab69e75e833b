"""What the meter costs: a decision of the broker with it and without, in turns in one process; and brokers at rest, one of each checkout.

    python -m tests.benchmarks.metering [--leases 200] [--events 4000] [--rounds 7] [--beside CHECKOUT] [--rest 60] [--json]

`--beside`: another checkout of this project, such as one of the commit before. Its broker and this one's rest beside each other for
`--rest` seconds, on 8 simulated devices, and the processor time of each is printed. Times are medians over rounds.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from fractional_gpu.broker.accounting.metering import Metering
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.metrics import Metrics
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import (
    Attached,
    BusyChanged,
    DeviceSeen,
    Event,
    HostMemorySeen,
    LeaseRequested,
    PoolConfigured,
    Wanted,
)
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, PoolSpec
from tests.core.driving import lease_measured
from tests.support.paths import ROOT

_DEVICES = 8
_TICK = os.sysconf("SC_CLK_TCK")


def arbiter_of(leases: int) -> Arbiter:
    """An arbiter with that many kernels that have been let in, on eight devices with room for all."""
    arbiter = Arbiter()
    names = tuple(f"GPU-{number}" for number in range(_DEVICES))
    setup: list[Event] = [
        DeviceSeen(at_ms=0, device=DeviceSpec(device_id=name, name="G", memory_mib=1_000_000)) for name in names
    ]
    setup += [PoolConfigured(at_ms=0, pool=PoolSpec(name="p", devices=names, fractions_milli=()))]
    setup += [HostMemorySeen(at_ms=0, budget_mib=10**9)]
    for number in range(leases):
        lease_id = f"lease-{number}"
        spec = LeaseSpec(lease_id=lease_id, pool="p", owner=f"u{number % 40}", fraction_milli=10, reserve_mib=1000)
        setup.append(LeaseRequested(at_ms=1, spec=spec))
        setup += [Attached(at_ms=2, lease_id=lease_id, gated=True), Wanted(at_ms=3, lease_id=lease_id)]
    for event in setup:
        arbiter.handle(event)
    return arbiter


def cells(leases: int, events: int) -> list[Event]:
    """Cells that begin and end, and a measurement of each kernel's memory after it."""
    found: list[Event] = []
    for number in range(events // 3):
        lease_id, at_ms = f"lease-{number * 7 % leases}", 1000 + number * 20
        found.append(BusyChanged(at_ms=at_ms, lease_id=lease_id, busy=True, by_cell=True))
        found.append(BusyChanged(at_ms=at_ms + 10, lease_id=lease_id, busy=False))
        found.append(lease_measured(at_ms + 15, lease_id, 100 + number % 50))
    return found


def decision_us(leases: int, events: int, *, metered: bool) -> float:
    """Return the processor time of one event as the broker handles it, microseconds, without its I/O."""
    arbiter = arbiter_of(leases)
    metrics = Metrics(arbiter)
    kernels = {
        f"lease-{number}": Kernel(lease_id=f"lease-{number}", uid=0, token_sha256="") for number in range(leases)
    }
    metering = Metering(arbiter, cast("Any", None), kernels)
    stream = cells(leases, events)
    begun = time.process_time()
    for event in stream:
        effects = arbiter.handle(event)
        metrics.saw(event, effects)
        if metered:
            metering.saw(event, effects)
        arbiter.run_deferred_work()
    return (time.process_time() - begun) * 1e6 / len(stream)


def start_broker(checkout: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """Start a broker of this checkout on simulated devices, and return when it serves."""
    parts = ("provisioner", "kernelext", "hub_spawner")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(checkout / part) for part in parts),
        "XDG_STATE_HOME": str(folder / "state"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
    }
    socket = folder / "run" / "broker.sock"
    socket.parent.mkdir(mode=0o700)
    command = [sys.executable, "-m", "fractional_gpu.commands.main", "broker", "--socket", str(socket)]
    command += ["--simulate", f"{_DEVICES}x80GiB", "--idle-exit", "never"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not socket.exists():  # nothing signals it to a process that is not a client
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit(f"the broker of {checkout} did not start; run: {' '.join(command)}")
        time.sleep(0.05)
    return process


def cpu_s(pid: int) -> float:
    """Return the processor time of the process and of its children that ended, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICK


def rest(checkouts: dict[str, Path], seconds: float) -> dict[str, float]:
    """Return the processor time of a broker of each checkout over so many seconds of rest beside each other, milliseconds for a second."""
    with tempfile.TemporaryDirectory(prefix="jfg-") as folder:
        brokers = {}
        for name, checkout in checkouts.items():
            (place := Path(folder) / name).mkdir(mode=0o700)
            brokers[name] = start_broker(checkout, place)
        try:
            time.sleep(5)  # its start is not its rest
            before = {name: cpu_s(one.pid) for name, one in brokers.items()}
            time.sleep(seconds)
            return {name: (cpu_s(one.pid) - before[name]) * 1000 / seconds for name, one in brokers.items()}
        finally:
            for one in brokers.values():
                one.send_signal(signal.SIGTERM)
            for one in brokers.values():
                one.wait(30)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--leases", type=int, default=200, help="kernels (default: 200)")
    parser.add_argument("--events", type=int, default=4000, help="events of each measurement (default: 4000)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each kind, in turns (default: 7)")
    parser.add_argument("--beside", type=Path, help="another checkout, whose broker rests beside this one's")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds of rest (default: 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * options.rounds):
        metered = bool(number % 2)
        times[metered].append(decision_us(options.leases, options.events, metered=metered))
    figures: dict[str, Any] = {
        "decision_us": round(statistics.median(times[False]), 1),
        "metered_decision_us": round(statistics.median(times[True]), 1),
        "ratio": round(statistics.median(b / a for a, b in zip(times[False], times[True], strict=True)), 3),
    }
    if options.beside is not None:
        resting = rest({"this": ROOT, "beside": options.beside.resolve()}, options.rest)
        figures["rest_ms_per_s"] = {name: round(ms, 2) for name, ms in resting.items()}
    if options.json:
        print(json.dumps(figures))
        return
    print(
        f"an event: {figures['decision_us']} us, metered {figures['metered_decision_us']} us ({figures['ratio']} times)"
    )
    for name, ms in figures.get("rest_ms_per_s", {}).items():
        print(f"a broker at rest, {name}: {ms} ms of processor time for each second")


if __name__ == "__main__":
    main()
