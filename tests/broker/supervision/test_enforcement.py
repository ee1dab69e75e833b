"""The broker ends only processes without a right to a device, and tells users who exceed their cap."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.kernels.connection import GateLink
from fractional_gpu.broker.kernels.process_inspector import LEASE_VARIABLE
from fractional_gpu.broker.supervision.enforcement import PATIENCE_S, Enforcement
from fractional_gpu.core.effects import CapBreached
from fractional_gpu.core.model import Breach, PoolSpec, Strangers
from fractional_gpu.gpu.interface import DeviceUse, ProcessKind, ProcessUse
from fractional_gpu.host.accounts import user_name
from fractional_gpu.host.process import identify, scan
from tests.broker.driver import DEVICE
from tests.broker.live import started_for
from tests.broker.monitoring.test_sampler import LEASE, World

pytestmark = pytest.mark.promise("race-limits", "caps")

STUBBORN = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
MEEK = "import sys; print(flush=True); sys.stdin.read()"


@contextmanager
def process(program: str = MEEK) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as started:
        assert started.stdout is not None
        started.stdout.readline()
        try:
            yield started
        finally:
            started.kill()


class Guarded(World):
    """A broker whose pool refuses strangers, at a time that the test sets."""

    def __init__(self, strangers: Strangers = Strangers.REFUSE) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.pool = PoolSpec(name="default", devices=(DEVICE,), strangers=strangers)
        self.enforcement = Enforcement(cast("Broker", self), clock=lambda: self.now_s)

    def see(self, *pids: int, kind: ProcessKind = ProcessKind.COMPUTE, lease_of: dict[int, str] | None = None) -> None:
        processes = tuple(ProcessUse(pid=pid, used_mib=100, kind=kind) for pid in pids)
        owners = {pid: (lease, identify(pid)) for pid, lease in (lease_of or {}).items()}
        use = DeviceUse(device_id=DEVICE, memory_mib=1024, used_mib=0, processes=processes)
        self.enforcement.see({DEVICE: use}, owners, scan(LEASE_VARIABLE))

    def passes(self, seconds: float, *pids: int, kind: ProcessKind = ProcessKind.COMPUTE) -> None:
        self.now_s += seconds
        self.see(*pids, kind=kind)


def is_running(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def test_a_stranger_is_asked_to_end_and_then_made_to() -> None:
    world = Guarded()
    with process(STUBBORN) as stubborn, process() as meek:
        world.see(stubborn.pid, meek.pid)
        world.passes(PATIENCE_S - 0.1, stubborn.pid, meek.pid)
        assert is_running(meek)
        world.passes(0.1, stubborn.pid, meek.pid)
        assert meek.wait(30) == -signal.SIGTERM
        world.passes(PATIENCE_S, stubborn.pid)
        assert stubborn.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("why", ["only shown", "draws", "a lease's", "carries a lease"])
def test_a_process_that_may_be_on_the_device_is_left_alone(why: str) -> None:
    world = Guarded(Strangers.IGNORE if why == "only shown" else Strangers.REFUSE)
    kind = ProcessKind.GRAPHICS if why == "draws" else ProcessKind.COMPUTE
    with process() as other, started_for(LEASE) as marked:
        pid = marked["pid"] if why == "carries a lease" else other.pid
        lease_of = {pid: LEASE} if why == "a lease's" else {}
        for _ in range(4):
            world.now_s += PATIENCE_S
            world.see(pid, kind=kind, lease_of=lease_of)
        assert is_running(other)
        assert world.enforcement._unwanted == {}
        assert [one.pid for one in world.enforcement.strangers[DEVICE]] == ([] if lease_of else [pid])


@pytest.mark.parametrize(
    ("name", "shown"),
    [(b"train", "train"), (b"", "?"), (b" \n\r\x1b[2J\xff", "\\n??[2J\\xff"), ("\u202eabc".encode(), "?abc")],
    ids=["plain", "empty", "bytes", "overriding"],
)
def test_the_name_of_a_stranger_is_harmless_whatever_it_calls_itself(name: bytes, shown: str) -> None:
    rename = f"import ctypes; ctypes.CDLL(None).prctl(15, ctypes.create_string_buffer({name!r}), 0, 0, 0)"
    world = Guarded(Strangers.IGNORE)
    with process(f"{rename}\n{MEEK}") as stranger:
        world.see(stranger.pid)
    (seen,) = world.enforcement.strangers[DEVICE]
    assert (seen.pid, seen.uid, seen.user) == (stranger.pid, os.getuid(), user_name(os.getuid()))
    assert seen.command == shown


def test_a_process_that_may_not_be_ended_is_shown_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_pidfd: int, _number: int) -> None:
        raise PermissionError

    world = Guarded()
    with process() as stranger:
        monkeypatch.setattr("fractional_gpu.broker.supervision.enforcement.signal.pidfd_send_signal", refuse)
        world.see(stranger.pid)
        for _ in range(3):
            world.passes(PATIENCE_S, stranger.pid)
    assert caplog.text.count("the broker's user is not permitted to end process") == 1


def breach(action: Breach) -> CapBreached:
    return CapBreached(lease_id=LEASE, action=action, sentence="more than its cap")


async def test_a_kernel_over_its_cap_is_told() -> None:
    world = Guarded()
    world.kernel.link = GateLink(0)
    world.enforcement.breached(breach(Breach.WARN))
    command = await world.kernel.link.next()
    assert command is not None
    assert (command.verb, command.sentence) == ("notice", "more than its cap")


def test_its_processes_on_the_device_are_ended_and_the_next_kernel_says_why() -> None:
    world = Guarded()
    with process() as root, process() as child, process() as bystander:
        world.see(root.pid, child.pid, lease_of={root.pid: LEASE, child.pid: LEASE, bystander.pid: LEASE})
        world.enforcement.breached(breach(Breach.KILL))
        assert {root.wait(30), child.wait(30)} == {-signal.SIGKILL}
        assert is_running(bystander), "it uses no device"
    assert world.kernel.notices == ["more than its cap"]


def test_a_number_that_another_process_has_now_is_not_ended() -> None:
    world = Guarded()
    with process() as other:
        world.see(other.pid, lease_of={other.pid: LEASE})
        (identity,) = world.enforcement._users[LEASE]
        world.enforcement._users[LEASE] = {replace(identity, start_time=identity.start_time - 1)}
        world.enforcement.breached(breach(Breach.KILL))
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(30) == 0, "it ended when it was told to, and not before"
