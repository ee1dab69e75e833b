"""SIGKILL to the broker, its worker, a kernel or the server, at rest and in the middle of a swap.

No bytes are lost, no reservation is left behind, nothing is given away twice, and the next broker finds out the truth.
A fault of the simulated GPU delays every pending swap, so each kill strikes at a known step.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests.support import faults
from tests.support.kept import Kept
from tests.support.stories import CHECK, fill
from tests.support.victims import (
    await_held,
    brokers,
    kill_all,
    new_broker,
    released,
    settled,
    stopped_or_traced,
    wait_for_end,
    workers,
)
from tests.support.world import Notebook, Server, World, new_world, until

pytestmark = pytest.mark.promise("kills")

MIB = 16
ALL_KILLS = bool(os.environ.get("JUPYTER_GPU_ALL_KILLS"))
STEPS = [(operation, fault) for operation in ("lock", "checkpoint", "restore", "unlock") for fault in ("hang", "late")]
"""Operation, and whether it is delayed before (`hang`) or after (`late`) it is done. A turn has them in this order."""

CONFIG = """
c.GPUBroker.pools = {
    "default": {"devices": ["0"], "preempt": "never", "retry_refused": "200ms", "unattached_ttl": "1m"},
    "other": {"unattached_ttl": "1m"},
}
"""


class Pair:
    """Two kernels with data that take turns on one device, and a third that runs one cell on the other device all the time."""

    def __init__(self, world: World, server: Server) -> None:
        self.world = world
        (name,) = world.install(750)
        (other,) = world.install(750, pool="other")
        self.stop = world.folder / "stop"
        self.bystander = server.start(other)
        self.bystander.must(fill(3))
        self.resident, self.suspended = server.start(name), server.start(name)
        self.suspended.must(fill(1, MIB))
        self.resident.must(fill(2, MIB))

    def begin(self) -> None:
        self.world.await_state(self.suspended.kernel_id, "suspended")
        self.stop.unlink(missing_ok=True)
        self.endless = self.bystander.send(
            "import os, time\nlooks = 0\nwhile not os.path.exists("
            f"{str(self.stop)!r}):\n    assert hashlib.sha256(buffer.read()).hexdigest() == digest\n    looks += 1\n"
            "    time.sleep(0.5)"  # it only has to stay undisturbed, without taking a processor from the others
        )

    def begin_turn(self) -> str:
        return self.suspended.send(CHECK)

    def end_turn(self, cell: str) -> None:
        reply = self.suspended.wait(cell)
        assert reply.text == "intact\n", (reply.status, reply.error, reply.text)
        self.resident, self.suspended = self.suspended, self.resident

    def finish(self) -> None:
        """Check all data, the bystander's undisturbed cell and the books; the pair is then at rest."""
        for notebook in (self.suspended, self.resident):
            assert notebook.must(CHECK).text == "intact\n"
        self.stop.touch()
        assert self.bystander.wait(self.endless).status == "ok"
        assert self.bystander.must("print(looks > 0)").text == "True\n"
        status = settled(self.world)
        assert {lease.kernel_id for lease in status.leases} == {one.kernel_id for one in self._notebooks}

    @property
    def _notebooks(self) -> tuple[Notebook, ...]:
        return self.bystander, self.suspended, self.resident

    def end(self) -> None:
        """Shut all of them down. Fails if a lease or a reservation is left."""
        for notebook in self._notebooks:
            notebook.shut_down()
        until(lambda: released(self.world), "every lease and every reservation is gone")


class Stage:
    """A world of two devices that hold one kernel each, in a separate pool, with a server and, once asked for, the pair."""

    def __init__(self, world: World, server: Server, config: str) -> None:
        self.world = world
        self.server = server
        self.config = config
        self._pair: Pair | None = None

    def pair(self) -> Pair:
        if self._pair is None:
            self._pair = Pair(self.world, self.server)
        self._pair.begin()
        return self._pair

    def clear(self) -> None:
        """End the pair and the broker. Fails if a lease or a reservation is left."""
        if self._pair is not None:
            self._pair.end()
            self._pair = None
        self.server.clear()
        self.world.end_broker()
        self.world.configure(self.config)


_PATIENT = "--KernelRestarter.restart_limit=1000"
"""The pair dies repeatedly; Jupyter gives a young kernel up after five deaths."""


@contextmanager
def new_stage() -> Iterator[Stage]:
    with new_world("2x128MiB") as world:
        world.configure(CONFIG)
        with Server(world, _PATIENT) as server:
            try:
                yield Stage(world, server, CONFIG)
            finally:
                if world.simulated_folder.exists():
                    faults.clear(world.simulated_folder)


@pytest.fixture(scope="module")
def kept_stage() -> Iterator[Kept[Stage]]:
    with Kept(new_stage) as kept:
        yield kept


@pytest.fixture
def stage(kept_stage: Kept[Stage], has_failed: Callable[[], bool]) -> Iterator[Stage]:
    """The stage of this file's tests: each leaves the pair as `Pair.finish` says, after any number of brokers and workers."""
    with kept_stage.taken(has_failed) as stage:
        yield stage


@pytest.fixture
def world(stage: Stage) -> World:
    return stage.world


@pytest.fixture
def server(stage: Stage) -> Server:
    return stage.server


@pytest.fixture
def pair(stage: Stage) -> Pair:
    return stage.pair()


@pytest.fixture
def empty(stage: Stage) -> Iterator[None]:
    """The stage without kernels and broker, before and after the test."""
    stage.clear()
    yield
    stage.clear()


# -- brokers that start ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("race-brokers")
def test_starters_at_once_end_up_with_one_broker(stage: Stage, world: World) -> None:
    stage.clear()
    options = json.dumps({"socket": world.socket})
    command = [sys.executable, "-P", "-m", "fractional_gpu.broker", "--detach", options]
    world.start_broker()
    world.kill_broker()  # they reset what a killed one leaves behind
    starters = [subprocess.Popen(command, env=world.environment, stderr=subprocess.PIPE) for _ in range(2)]
    for starter in starters:
        _, complaint = starter.communicate(timeout=120)
        assert starter.returncode == 0, complaint.decode()
    until(lambda: len(brokers(world)) == 1 or None, "the losers end")
    assert brokers(world) == [world.broker_pid()]
    assert len(workers(world)) == 1


@pytest.mark.promise("race-first-use")
def test_nothing_is_granted_before_the_ledger_holds_it_and_what_was_let_in_keeps_its_room(
    world: World, server: Server
) -> None:
    """The broker is killed before it has written down that a kernel was let in: the next one would give the same room away again.

    None of the kernels touches the device.
    """
    (name,) = world.install(750)
    first, second = server.start(name), server.start(name)
    ran = world.folder / "ran"
    ledger = sqlite3.connect(world.ledger, isolation_level=None)
    ledger.execute("BEGIN IMMEDIATE")  # the broker's writes wait
    cell = first.send(f"from pathlib import Path\nPath({str(ran)!r}).touch()")
    world.await_state(first.kernel_id, "resident")
    assert second.must("%%cpu\nprint('time passes')").text == "time passes\n"
    assert not ran.exists()
    world.kill_broker()
    ledger.execute("ROLLBACK")
    ledger.close()
    assert first.wait(cell).status == "ok"
    assert ran.exists()
    settled(world)
    world.kill_broker()
    world.start_broker()
    lease = world.lease(first.kernel_id)
    assert (lease.state, world.status().devices[0].reserved_mib) == ("resident", lease.spec.reserve_mib)
    assert second.must("print('let in')").text == "let in\n"
    settled(world)
    for notebook in (first, second):
        notebook.shut_down()


@pytest.mark.promise("race-moves")
@pytest.mark.usefixtures("empty")
def test_a_broker_killed_in_a_move_remembers_where_the_checkpoint_was_made(world: World, server: Server) -> None:
    """It must be restored onto the device where its room is. The device it came from is full: a restore there would be fatal."""
    world.configure('c.GPUBroker.pools = {"default": {"may_move": True, "retry_refused": "200ms"}}')
    (name,) = world.install(750)
    staying, leaving, moving = (server.start(name) for _ in range(3))
    moving.must(fill(1, MIB))
    home = world.lease(moving.kernel_id).lease.device_id
    leaving.must(fill(2, MIB))
    assert world.lease(leaving.kernel_id).lease.device_id != home
    staying.must(fill(3, MIB))
    world.await_state(moving.kernel_id, "suspended")
    assert world.lease(staying.kernel_id).lease.device_id == home
    leaving.shut_down()
    faults_in_turn = ("late", "hang") if ALL_KILLS else ("hang",)
    for fault in faults_in_turn:
        with stopped_or_traced(world, "restore", fault):
            cell = moving.send(CHECK)
            await_held(world)
            kill_all(brokers(world) + workers(world))
        reply = moving.wait(cell)
        assert reply.text == "intact\n", reply.error
        assert world.lease(moving.kernel_id).lease.device_id != home
        assert staying.must(CHECK).text == "intact\n"
        settled(world)
        if fault != faults_in_turn[-1]:  # back home, for another move
            with world.client() as client:
                client.suspend(world.lease(moving.kernel_id).lease_id)
            home, blocker = world.lease(moving.kernel_id).lease.device_id, server.start(name)
            blocker.must(fill(4, MIB))
            assert world.lease(blocker.kernel_id).lease.device_id == home
            staying.shut_down()
            staying = blocker
    for notebook in (staying, moving):
        notebook.shut_down()


# -- at rest -------------------------------------------------------------------------------------------------------------


def test_resident_kernels_work_with_no_broker_and_a_new_one_finds_at_rest_what_the_old_one_knew(
    world: World, pair: Pair
) -> None:
    world.kill_broker()
    assert pair.resident.must(CHECK).text == "intact\n"
    assert world.broker_pid() is None, "a resident kernel needs none"
    cell = pair.begin_turn()  # a suspended one does
    pair.end_turn(cell)
    before = {lease.lease_id: lease for lease in settled(world).leases}
    world.kill_broker()
    world.start_broker()
    after = {lease.lease_id: lease for lease in settled(world).leases}
    for lease_id, lease in before.items():
        found = after.pop(lease_id)
        for name in ("state", "pid", "kernel_id", "suspends", "resumes"):
            assert getattr(found, name) == getattr(lease, name), name
        for name in ("device_id", "saved_mib", "spec"):
            assert getattr(found.lease, name) == getattr(lease.lease, name), name
    assert not after
    pair.finish()


def test_a_worker_killed_at_rest_is_replaced_when_needed(world: World, pair: Pair) -> None:
    (broker,) = brokers(world)
    kill_all(workers(world))
    pair.end_turn(pair.begin_turn())
    assert brokers(world) == [broker]
    assert len(workers(world)) == 1
    pair.finish()


def test_a_kernel_killed_at_rest_leaves_no_reservation_and_comes_back_under_its_lease(
    world: World, server: Server, pair: Pair
) -> None:
    suspended, resident = (world.lease(victim.kernel_id) for victim in (pair.suspended, pair.resident))
    assert suspended.pid is not None
    assert resident.pid is not None
    kill_all([suspended.pid])
    world.await_restart(pair.suspended.kernel_id, suspended.pid)
    second = _again(server, pair.suspended)
    kill_all([resident.pid])
    second.must(fill(5, MIB))  # what the dead process held is free at once: no kernel is suspended for it
    world.await_restart(pair.resident.kernel_id, resident.pid)
    for before in (suspended, resident):
        lease = world.lease(before.kernel_id)
        assert (lease.lease_id, lease.suspends, lease.lease.saved_mib) == (before.lease_id, before.suspends, 0)
    assert world.lease(pair.resident.kernel_id).state == "unarmed"
    first = _again(server, pair.resident)
    first.must(fill(4, MIB))
    pair.resident, pair.suspended = first, second
    pair.finish()


# -- in the middle of a swap ---------------------------------------------------------------------------------------------------


def _broker_alone(world: World) -> list[int]:
    return brokers(world)


def _broker_and_worker(world: World) -> list[int]:
    return brokers(world) + workers(world)


def _worker_alone(world: World) -> list[int]:
    return workers(world)


# Each step once, and each operation with two victims; `test_nvidia_mode` has other pairs.
# With JUPYTER_GPU_ALL_KILLS every victim dies at every step.
SAMPLE: dict[Callable[[World], list[int]], list[tuple[str, str]]] = {
    _broker_alone: [("checkpoint", "hang"), ("restore", "late")],
    _broker_and_worker: [("lock", "hang"), ("unlock", "late")],
    _worker_alone: [("lock", "late"), ("checkpoint", "late"), ("restore", "hang"), ("unlock", "hang")],
}


@pytest.mark.promise("race-brokers")
@pytest.mark.parametrize("victims", SAMPLE)
def test_a_kill_at_any_step_of_a_turn_loses_nothing(
    world: World, pair: Pair, victims: Callable[[World], list[int]]
) -> None:
    for operation, fault in STEPS if ALL_KILLS else SAMPLE[victims]:
        old = world.broker_pid()
        with stopped_or_traced(world, operation, fault):
            cell = pair.begin_turn()
            await_held(world)
            pids = victims(world)
            assert pids, f"at {operation} {fault}"
            kill_all(pids)
            if victims is _broker_alone:
                _new_broker_waits_for_the_orphan(world, old)
        pair.end_turn(cell)
        if victims is not _worker_alone:
            assert new_broker(world, old) in brokers(world)
        settled(world)
        assert len(workers(world)) == 1
    pair.finish()


def _new_broker_waits_for_the_orphan(world: World, old: int | None) -> None:
    """The waiting cell starts a broker; while the old one's worker is delayed, the new broker has no worker and changes nothing."""
    (orphan,) = workers(world)
    new_broker(world, old)
    assert workers(world) == [orphan]
    status = world.status()
    moving = [lease for lease in status.leases if lease.spec.pool == "default"]
    assert [lease.state for lease in moving] == ["quarantined", "quarantined"]
    assert not any(device.over_committed for device in status.devices)


@pytest.mark.parametrize(("operation", "fault"), STEPS if ALL_KILLS else [("restore", "late")])
def test_a_kernel_killed_in_its_swap_frees_everything_and_disturbs_no_other(
    world: World, server: Server, pair: Pair, operation: str, fault: str
) -> None:
    suspending = (operation, fault) in STEPS[:4]
    victim = pair.resident if suspending else pair.suspended
    pid = world.lease(victim.kernel_id).pid
    assert pid is not None
    with stopped_or_traced(world, operation, fault):
        cell = pair.begin_turn()
        await_held(world)
        kill_all([pid])
        until(lambda: world.lease(victim.kernel_id).pid != pid, "the broker sees the end")
    if suspending:
        pair.end_turn(cell)
    else:
        assert pair.resident.must(CHECK).text == "intact\n"
    world.await_restart(
        victim.kernel_id, pid
    )  # a young kernel gets new ports, and requests to the old ones would never be answered
    pair.suspended = _again(server, victim)
    pair.suspended.must(fill(7, MIB))
    pair.resident, pair.suspended = pair.suspended, pair.resident
    pair.finish()


def _again(server: Server, notebook: Notebook) -> Notebook:
    notebook.close()
    return server.connect(notebook.kernel_id)


# -- cells that wait ---------------------------------------------------------------------------------------------------------


def test_a_cell_that_waits_starts_a_new_broker_and_goes_on(world: World, pair: Pair) -> None:
    go = world.folder / "go"
    held = pair.resident.send(
        f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    assert buffer.read(16)\n    time.sleep(0.01)\n{CHECK}"
    )
    until(lambda: world.lease(pair.resident.kernel_id).busy or None, "the first kernel is busy")
    cell = pair.begin_turn()
    until(lambda: world.lease(pair.suspended.kernel_id).position == 1 or None, "the second kernel waits")
    old = world.broker_pid()
    world.kill_broker()
    assert new_broker(world, old) != old
    until(lambda: world.lease(pair.suspended.kernel_id).position == 1 or None, "it waits again")
    assert world.lease(pair.resident.kernel_id).state == "resident"
    go.touch()
    assert pair.resident.wait(held).text == "intact\n"
    pair.end_turn(cell)
    pair.finish()


# -- an orderly end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "fault"), STEPS if ALL_KILLS else [("checkpoint", "late")])
def test_a_broker_told_to_stop_finishes_what_it_began(world: World, pair: Pair, operation: str, fault: str) -> None:
    old = world.broker_pid()
    assert old is not None
    with stopped_or_traced(world, operation, fault):
        cell = pair.begin_turn()
        await_held(world)
        ended = os.pidfd_open(old)
        os.kill(old, signal.SIGTERM)
        until(lambda: world.broker_pid() is None or None, "it no longer serves")
        assert workers(world), "but its operation continues"
    wait_for_end(ended)
    pair.end_turn(cell)  # its waiting cell has started another broker
    assert new_broker(world, old) != old
    settled(world)
    pair.finish()


# -- a worker without its broker -----------------------------------------------------------------------------------------------


def test_a_worker_that_hangs_without_its_broker_ends_itself(stage: Stage, world: World, pair: Pair) -> None:
    """The next broker gets its turn at the old one's deadline, and the cell that waits for it continues."""
    world.configure(stage.config + 'c.GPUBroker.checkpoint_deadline = "3s"\n')
    kill_all(brokers(world) + workers(world))
    world.start_broker()
    with stopped_or_traced(world, "checkpoint", "hang"):
        cell = pair.begin_turn()
        await_held(world)
        orphans = workers(world)
        kill_all(brokers(world))
        pair.end_turn(cell)
        assert workers(world) != orphans
    world.configure(stage.config)
    kill_all(brokers(world) + workers(world))  # a cell starts another
    pair.finish()


# -- the server is killed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", [None, ("checkpoint", "hang"), ("restore", "late")] if ALL_KILLS else [("checkpoint", "hang")], ids=str
)
def test_a_killed_server_takes_its_kernels_along_and_their_reservations(
    kept_stage: Kept[Stage], step: tuple[str, str] | None
) -> None:
    """It ends the stage, so it comes last."""
    with kept_stage.taken(lambda: True) as stage:
        world, pair = stage.world, stage.pair()
        for pool in ("default", "other"):  # only now: on a slow machine a kernel takes longer to start
            assert world.command("pool", pool, "unattached_ttl=2s").returncode == 0
        descriptors = [os.pidfd_open(lease.pid) for lease in world.status().leases if lease.pid is not None]
        assert len(descriptors) == 3
        with stopped_or_traced(world, *step) if step else nullcontext():
            if step:
                pair.begin_turn()
                await_held(world)
            stage.server.stop(signal.SIGKILL)
            for descriptor in descriptors:
                wait_for_end(descriptor)
        until(lambda: released(world), "every lease and every reservation is gone")
