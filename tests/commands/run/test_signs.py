"""The signs that a suspended command needs the GPU: its connections, and its use of the CPU."""

import errno
import os
import socket
import time
from collections.abc import Iterator

import pytest

from fractional_gpu.commands.run import supervisor as signs
from fractional_gpu.commands.run.supervisor import (
    BUSY_US,
    HALF_CLOSED_S,
    LONGEST_PATIENCE_S,
    USEFUL_US,
    CpuWatch,
    Ports,
    cpu_us,
)
from tests.support.world import until

pytestmark = pytest.mark.promise("commands-run")

# -- CPU ---------------------------------------------------------------------------------------------------------------


class Command:
    """A command with figures set by the test; `used_us` grows with its use, `at_s` with time."""

    def __init__(self) -> None:
        self.watch = CpuWatch()
        self.used_us, self.at_s = 1_000_000, 100.0

    def suspend(self, *, worked: bool = False, used_before: int = 0, used_resident: int = 0) -> None:
        """It is on the GPU for a while and then suspended. The last look before that came after it had used `used_before`."""
        self.used_us += used_resident
        self.watch.resident(self.used_us)
        self.used_us += used_before
        self.watch.resident(self.used_us)
        self.watch.suspended(self.used_us, self.at_s, worked=worked)

    def look(self, used_us: int = 0, *, after_s: float = 0.25) -> bool:
        self.used_us, self.at_s = self.used_us + used_us, self.at_s + after_s
        return self.watch.look(self.used_us, self.at_s)


@pytest.fixture
def command() -> Command:
    return Command()


def test_one_that_uses_no_cpu_stays_suspended(command: Command) -> None:
    command.suspend()
    assert not any(command.look(after_s=3600) for _ in range(10))


def test_one_that_woke_and_waits_again_needs_the_gpu_at_once(command: Command) -> None:
    command.suspend()
    assert not command.look()
    assert command.look(40)


def test_one_that_computes_needs_it_when_it_stops_computing(command: Command) -> None:
    command.suspend()
    assert not any(command.look(250_000) for _ in range(2000))
    assert command.look(BUSY_US - 1)


def test_one_that_computes_without_a_pause_is_brought_back_now_and_then(command: Command) -> None:
    command.suspend()
    assert not command.look(BUSY_US)
    assert not command.look(BUSY_US, after_s=LONGEST_PATIENCE_S - 1)
    assert command.look(BUSY_US, after_s=1)


def test_each_wasted_resume_delays_the_next_sign(command: Command) -> None:
    command.suspend()
    waits = []
    for _ in range(10):
        waits.append(command.watch.patience_s)
        assert not waits[-1] or not command.look(40, after_s=waits[-1] - 0.1)
        assert command.look(40, after_s=0.2)
        command.suspend()
    assert waits == [0, 5, 10, 20, 40, 80, 160, 320, 600, 600]


@pytest.mark.parametrize(("worked", "used_us"), [(True, 0), (False, USEFUL_US)])
def test_that_it_worked_or_computed_ends_this(command: Command, worked: bool, used_us: int) -> None:
    command.suspend()
    for _ in range(2):
        assert command.look(40, after_s=60)
        command.suspend()
    assert command.watch.patience_s == 10
    command.look(40, after_s=60)
    command.suspend(worked=worked, used_resident=used_us)
    assert command.watch.patience_s == 0


def test_the_cpu_time_of_a_process_and_its_threads_is_counted() -> None:
    before_us, begun_s = cpu_us(os.getpid()), time.process_time()
    while time.process_time() < begun_s + 0.05:
        pass
    assert 40_000 <= cpu_us(os.getpid()) - before_us <= 5_000_000


# -- connections -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        if request.param == "127.0.0.1":
            yield made
            return
        try:  # on the same port, so that no other test's connections over IPv4 are counted
            other = socket.create_server((request.param, made.getsockname()[1]), family=socket.AF_INET6)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
            pytest.skip("this machine has no IPv6")
        with other:
            yield other


@pytest.fixture
def ports(listener: socket.socket) -> Ports:
    return Ports([listener.getsockname()[1]])


def test_a_system_that_cannot_list_connections_may_have_one(monkeypatch: pytest.MonkeyPatch, ports: Ports) -> None:
    def refuse(_family: int, _port: int) -> list[tuple[bytes, int]]:
        raise OSError(errno.EPROTONOSUPPORT, "no such protocol")

    monkeypatch.setattr(signs, "diagnosed", refuse)
    assert ports.open(0) == 1


def test_a_connection_counts_before_it_is_accepted_and_until_both_sides_have_closed_it(
    listener: socket.socket, ports: Ports
) -> None:
    assert ports.open(0) == 0
    with socket.create_connection(listener.getsockname()[:2]) as client:
        assert ports.open(0) == 1
        accepted, _ = listener.accept()
        assert ports.open(0) == 1
        client.shutdown(socket.SHUT_WR)
        until(lambda: accepted.recv(1) == b"", "the end is seen")
        assert ports.open(10) == 1, "it may wait for its answer"
        assert ports.open(10 + HALF_CLOSED_S) == 0, "it was forgotten"
        accepted.close()
    assert ports.open(100) == 0


def test_other_ports_and_connections_from_the_command_do_not_count(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()[:2]) as client:
        assert Ports([1]).open(0) == 0
        # The table has both ends of a local one; a connection of another program to elsewhere may have the same port.
        assert Ports([client.getsockname()[1]]).open(0) >= 1
