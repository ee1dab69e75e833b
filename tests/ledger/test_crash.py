"""Acknowledged writes survive a killed writer, however it was interrupted."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fractional_gpu.ledger.ledger import METER, Ledger

_WRITER = """
import sys
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord
from fractional_gpu.ledger.records import Launch
ledger = Ledger.open(sys.argv[1])
number = len(ledger.live_leases())
while True:
    number += 1
    lease_id = f"lease {number}"
    spec = LeaseSpec(lease_id=lease_id, pool="default", owner="ada", fraction_milli=250, reserve_mib=100)
    with ledger.transaction():
        ledger.save_lease(LeaseRecord(
            spec=spec, state=LeaseState.RESIDENT, generation=1, device_ids=("GPU-1",), saved_mib=0, uid=0, token_sha256="",
            connection="", created_ms=number, launch=Launch(), identity=None,
        ))
        ledger.record(lease_id, number, "test", "in the same transaction")
    ledger.record(lease_id, number, "test", "x" * 500)
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize("acknowledged", [0, 1, 150])
def test_everything_acknowledged_survives_a_kill(path: Path, acknowledged: int) -> None:
    seen: list[int] = []
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        seen += [int(writer.stdout.readline()) for _ in range(acknowledged)]
        writer.send_signal(signal.SIGKILL)
        seen += map(int, writer.stdout.read().split())
        writer.stdout.close()
        assert writer.wait(30) == -signal.SIGKILL

        with Ledger.open(path) as ledger:
            leases = [lease.created_ms for lease in ledger.live_leases()]
            assert leases == list(range(1, len(leases) + 1))
            assert all(ledger.story(f"lease {number}") for number in leases)
            assert set(seen) <= set(leases)
            assert all(len(ledger.story(f"lease {number}")) == 2 for number in seen)


_METER = """
import sys
from fractional_gpu.core.metering.usage import Party, Usage, UsageRow
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.ledger import METER
ledger = Ledger.open(sys.argv[1])
number = int(ledger.kept(METER) or 0)
while True:
    number += 1
    rows = [UsageRow.of(3600 * hour, "EUR", Party("default"), Usage(reserved_ms=1, energy_mj=number)) for hour in range(3)]
    ledger.add_metered(rows, str(number))
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize("acknowledged", [0, 1, 100])
def test_figures_and_the_meters_state_are_of_the_same_moment_after_a_kill(path: Path, acknowledged: int) -> None:
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", _METER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(acknowledged)]
        writer.send_signal(signal.SIGKILL)
        seen += map(int, writer.stdout.read().split())
        writer.stdout.close()
        assert writer.wait(30) == -signal.SIGKILL

        with Ledger.open(path) as ledger:
            written = int(ledger.kept(METER) or 0)
            hours = [(usage.reserved_ms, usage.energy_mj) for _, usage in ledger.metered(["hour"], 0, 2**40)]
            assert hours == ([(written, written * (written + 1) // 2)] * 3 if written else [])
            assert max(seen, default=0) <= written
