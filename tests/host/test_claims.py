"""Promises of fractional_gpu.host.claims, with real sockets and real processes."""

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from fractional_gpu.host import claims
from fractional_gpu.host.claims import DeviceClaim, DeviceClaimedError
from tests.support.paths import ROOT

HOLDER = """
import sys
from fractional_gpu.host.claims import DeviceClaim
claim = DeviceClaim.claim(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def device_id() -> str:
    return f"GPU-{uuid.uuid4()}"


@pytest.fixture
def holder(device_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has claimed the device."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, device_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
        process.kill()


def test_a_second_claim_is_refused_and_names_the_holder(device_id: str, holder: subprocess.Popen[bytes]) -> None:
    with pytest.raises(
        DeviceClaimedError, match=rf"{device_id} is already managed by process {holder.pid} of user"
    ) as caught:
        DeviceClaim.claim(device_id)
    assert (caught.value.device_id, caught.value.pid, caught.value.uid) == (device_id, holder.pid, os.getuid())


def test_a_claim_vanishes_with_its_holder_however_it_ends(device_id: str, holder: subprocess.Popen[bytes]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with DeviceClaim.claim(device_id) as claim:
        assert claim.fileno() >= 0


def test_a_claim_ends_when_it_is_closed(device_id: str) -> None:
    with DeviceClaim.claim(device_id) as claim, pytest.raises(DeviceClaimedError, match=f"process {os.getpid()} "):
        DeviceClaim.claim(device_id)
    claim.close()
    DeviceClaim.claim(device_id).close()


def test_a_refused_claim_leaves_nothing_open(device_id: str) -> None:
    with DeviceClaim.claim(device_id):
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(DeviceClaimedError):
            DeviceClaim.claim(device_id)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_too_many_curious_claimants_are_refused_without_blocking_until_they_are_drained(
    device_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_BACKLOG", 2)
    with DeviceClaim.claim(device_id) as claim:
        told = []
        for _ in range(5):
            with pytest.raises(DeviceClaimedError) as caught:
                DeviceClaim.claim(device_id)
            told.append(caught.value.pid)
        assert told[0] == os.getpid()
        assert told[-1] is None
        assert "cannot be identified" in str(caught.value)
        assert claim.drain() == sum(pid is not None for pid in told)
        with pytest.raises(DeviceClaimedError, match=f"process {os.getpid()} "):
            DeviceClaim.claim(device_id)
        assert claim.drain() == 1
        assert claim.drain() == 0
        assert claim.fileno() >= 0


def test_a_name_that_is_taken_but_not_listened_on_counts_as_claimed(device_id: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(f"\0jupyter-gpu-device-{device_id}")
        with pytest.raises(DeviceClaimedError) as caught:
            DeviceClaim.claim(device_id)
    assert (caught.value.pid, caught.value.uid) == (None, None)
