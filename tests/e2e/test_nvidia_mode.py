"""The whole broker in NVIDIA mode, on a double of the driver's libraries: no kernel loses a byte, and each refusal says why.

The double imitates drivers 570 and 580. What NVIDIA does not document (the caller dies in the middle of a checkpoint or a restore)
is simulated both ways: the target recovers, or it has failed for good.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any, Final

import pytest

from fractional_gpu.protocol.errors import ConflictError, FractionalGPUError
from tests.support.kept import Kept
from tests.support.nvidia_mode import (
    CHECK,
    CONTEXT_MIB,
    DATA_MIB,
    DEVICE_MIB,
    GREEDY,
    NvidiaMode,
    Pair,
    fill,
    nvidia_mode,
    run_command,
)
from tests.support.stopping import stop
from tests.support.victims import kill_all
from tests.support.world import Notebook, Server, World, until

ALL_KILLS: Final = bool(os.environ.get("JUPYTER_GPU_ALL_KILLS"))
"""Kill at every step, every victim, on every driver; by default each of these pairs comes once."""

CALLS: Final = {name: f"cuCheckpointProcess{name.title()}" for name in ("lock", "checkpoint", "restore", "unlock")}
MOMENTS: Final = [(name, late) for name in CALLS for late in (False, True)]
VICTIMS: Final = {"broker": ("brokers",), "worker": ("workers",), "both": ("brokers", "workers")}
# Each call once and each victim, before and after on either driver; `test_kills` has the other pairs of a call and a
# victim.
SAMPLE: Final = {
    "570": [("lock", False, "worker"), ("restore", True, "worker")],
    "580": [("checkpoint", False, "broker"), ("unlock", True, "both")],
}


Served = tuple[NvidiaMode, Server]


@contextmanager
def served() -> Iterator[Served]:
    with nvidia_mode() as mode:
        mode.serve("580", 1)
        with Server(mode.world) as server:
            yield mode, server


@pytest.fixture(scope="module")
def kept_mode() -> Iterator[Kept[Served]]:
    """Shared by this file's tests one after another: the server stays, kernels do not."""
    with Kept(served) as kept:
        yield kept


@pytest.fixture
def lent(request: pytest.FixtureRequest, kept_mode: Kept[Served], has_failed: Callable[[], bool]) -> Iterator[Served]:
    """One device, driver 580. The parameter: another driver, and the number of devices."""
    with kept_mode.taken(has_failed) as (mode, server):
        mode.serve(*getattr(request, "param", ("580", 1)))
        yield mode, server
        if not has_failed():
            server.clear()
            mode.reset()


@pytest.fixture
def mode(lent: Served) -> NvidiaMode:
    return lent[0]


@pytest.fixture
def world(mode: NvidiaMode) -> World:
    return mode.world


@pytest.fixture
def server(lent: Served) -> Server:
    return lent[1]


on_each_driver = pytest.mark.parametrize("lent", [("580", 1), ("570", 1)], indirect=True, ids=["580", "570"])


@contextmanager
def asked(mode: NvidiaMode, notebook: Notebook) -> Iterator[None]:
    """Ask for a suspend in another thread; the answer may never come, because the process that suspends is killed."""

    def ask() -> None:
        with suppress(FractionalGPUError):
            mode.suspend(notebook)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        thread.join()


# -- before the first kernel -------------------------------------------------------------------------------------------------


def test_doctor_and_broker_try_a_checkpoint() -> None:
    with nvidia_mode(driver="580") as mode:
        said = run_command(mode.world, "doctor", "--json")
        findings = {one["check"]: one for one in json.loads(said.stdout)["findings"]}
        assert findings["checkpoint"]["severity"] == findings["process-use"]["severity"] == "ok", said.stdout
        assert "saved and restored" in findings["checkpoint"]["finding"]
        assert mode.calls("cuCheckpointProcessRestore")
        mode.world.start_broker()
        assert "checkpoint self-test: it works" in mode.world.logs()["broker.log"], "before it serves"
        assert len(mode.calls("cuCheckpointProcessRestore")) == 2
        until(
            lambda: {one.pid for one in mode.double.processes()} <= set(mode.workers()),
            "the processes tried on are gone",
        )


def test_missing_rights_are_found_before_the_broker_serves() -> None:
    with nvidia_mode(driver="580") as mode:
        mode.double.fail("cuCheckpointProcessLock", 304, times=None)
        mode.world.start_broker()
        with mode.world.client() as client:
            (device,) = client.status().devices
        assert "missing rights" in device.why_not
        assert "gVisor" in device.why_not
        assert len(mode.calls("cuCheckpointProcessLock")) == 1, "it is not tried again"


# -- the caller dies in the middle ---------------------------------------------------------------------------------------------


def die_in_the_middle(mode: NvidiaMode, notebook: Notebook, operation: str, *, of: tuple[str, ...]) -> str:
    """Kill in the middle of a checkpoint or a restore and wait until the target has noticed; return the waiting cell."""
    pid, moving = mode.pid(notebook), {"checkpoint": "checkpointing", "restore": "restoring"}[operation]
    cell = ""
    if operation == "restore":
        mode.suspend(notebook)
    mode.double.set(save_gb_s=0.02, load_gb_s=0.02)

    def kill() -> None:
        until(lambda: mode.state(pid) == moving, f"the {operation} is under way")
        kill_all([victim for kind in of for victim in getattr(mode, kind)()])
        mode.double.set(save_gb_s=0, load_gb_s=0)
        until(lambda: mode.state(pid) != moving, "the target noticed")

    if operation == "restore":
        cell = notebook.send(CHECK)
        kill()
    else:
        with asked(mode, notebook):
            kill()
        cell = notebook.send(CHECK)
    return cell


def one_that_outlives_its_callers_death_has_all_its_bytes(mode: NvidiaMode, notebook: Notebook, turn: int) -> None:
    victims = list(VICTIMS.values())
    every = list(product(("checkpoint", "restore"), ("back", "done")))
    half = [every[turn], every[3 - turn]]  # the other driver has the other half
    for number, (operation, ending) in enumerate(every if ALL_KILLS else half):
        mode.double.set(caller_death=ending)
        reply = notebook.wait(die_in_the_middle(mode, notebook, operation, of=victims[1 + (number + turn) % 2]))
        assert reply.text == "intact\n", (operation, ending, reply.error)
        mode.settled()


def test_a_kernel_that_failed_with_its_caller_is_left_alone_and_its_user_is_told(
    mode: NvidiaMode, server: Server
) -> None:
    notebook, neighbour = mode.start(server), mode.start(server)
    for operation, victim in (("checkpoint", "both"), ("restore", "worker")):
        notebook = fails_with_its_caller(mode, server, notebook, operation, victim)
        neighbour.must(fill(3))
        assert notebook.must(CHECK).text == "intact\n"
        assert neighbour.must(CHECK).text == "intact\n"


def fails_with_its_caller(
    mode: NvidiaMode, server: Server, notebook: Notebook, operation: str, victim: str
) -> Notebook:
    """Return the notebook with its next kernel."""
    notebook.must(f"kept = 'in host memory'\n{fill(1)}")
    mode.double.set(caller_death="failed")
    pid = mode.pid(notebook)
    reply = notebook.wait(die_in_the_middle(mode, notebook, operation, of=VICTIMS[victim]))
    assert reply.status == "error"
    assert f"an uncorrectable error in process {pid}:" in reply.error
    assert "restart the kernel" in reply.error
    lease = mode.world.lease(notebook.kernel_id)
    assert (lease.state, lease.sentence in reply.error) == ("quarantined", True), (lease, reply.error)
    assert lease.sentence in mode.story(notebook)
    explained = notebook.must("%gpu explain")
    assert "an uncorrectable error in process" in str(explained.data)
    assert "an uncorrectable error in process" in mode.world.command("explain", lease.lease_id).stdout
    assert notebook.must("%%cpu\nprint(kept)").text == "in host memory\n"
    restores = len(mode.calls("cuCheckpointProcessRestore", pid))
    with pytest.raises(ConflictError, match="an uncorrectable error"), mode.world.client() as client:
        client.resume(lease.lease_id)
    assert len(mode.calls("cuCheckpointProcessRestore", pid)) == restores, "nothing is tried with it"
    mode.double.set(caller_death="back")
    notebook.restart()
    again = server.connect(notebook.kernel_id)
    again.must(fill(2))
    return again


# -- processes that are not like others ----------------------------------------------------------------------------------------

CHILD = """
import subprocess, sys
code = "from tests.driver_double import device; device.start(); print('started', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "started\\n"
"""
FORK = """
import os
inherited, release = os.pipe()
forked = os.fork()
if forked == 0:
    os.close(release)
    os.read(inherited, 1)
    os._exit(0)
print(forked)
"""


def test_processes_that_only_started_the_driver_are_saved_and_come_back(mode: NvidiaMode, server: Server) -> None:
    """They are saved whether NVML lists them, with no memory, or not."""
    bare, parent = mode.start(server), mode.start(server)
    bare.must("from tests.driver_double import device as cuda; cuda.start()")
    parent.must(fill(1) + CHILD)
    child = int(parent.must("print(child.pid)").text)
    for listed in ("unlisted", "zero"):
        mode.double.set(init_only_listed=listed)
        for notebook, pids in ((bare, [mode.pid(bare)]), (parent, [mode.pid(parent), child])):
            if mode.world.lease(notebook.kernel_id).state == "resident":
                mode.suspend(notebook)
            assert {mode.state(one) for one in pids} == {"checkpointed"}, listed
        bare.must("pass")
        assert parent.must(CHECK).text == "intact\n"
        assert mode.state(child) == "running"
    for _ in range(2):
        bare.must("buffer = cuda.allocate(1 << 20); buffer.fill(b'after')")
        assert parent.must(CHECK).text == "intact\n"
        assert mode.state(child) == "running"
    parent.must("child.communicate('')")
    mode.settled()
    a_child_that_only_asked_for_the_devices_is_left_alone(mode, parent)


def a_child_that_only_asked_for_the_devices_is_left_alone(mode: NvidiaMode, parent: Notebook) -> None:
    """NVML lists it with no memory, and the driver does not know it when asked to lock it."""
    mode.double.set(init_only_listed="zero", init_only_lock=3, no_cuda=1)
    parent.must(CHILD)
    child = int(parent.must("print(child.pid)").text)
    mode.suspend(parent)
    assert (mode.state(mode.pid(parent)), mode.state(child)) == ("checkpointed", "running")
    assert parent.must(CHECK).text == "intact\n"
    parent.must("child.communicate('')")
    mode.settled()


def test_what_keeps_a_kernel_is_named_until_it_is_over_and_nothing_else_keeps_it(
    mode: NvidiaMode, server: Server
) -> None:
    mode.double.set(forked_known=True)
    notebook = mode.start(server)
    notebook.must(fill(1))
    threads_that_nvml_names_and_a_daemon_of_mps_keep_no_kernel(mode, notebook)
    a_forked_child_that_shares_the_context_is_named_until_it_has_ended(mode, notebook)
    stopped_it_is_refused_at_once_by_its_pid(mode, notebook)
    mode.reset()
    for is_seen_before in (True, False):
        no_restore_is_tried_where_a_stranger_leaves_too_little_room(mode, notebook, is_seen_before=is_seen_before)


def threads_that_nvml_names_and_a_daemon_of_mps_keep_no_kernel(mode: NvidiaMode, notebook: Notebook) -> None:
    for plays in ("nvml_thread_ids", "mps_daemon"):
        switches: dict[str, Any] = {plays: True}
        mode.double.set(**switches)
        until(lambda: mode.world.lease(notebook.kernel_id).lease.used_mib > 0, "its memory is counted")
        mode.suspend(notebook)
        assert mode.state(mode.pid(notebook)) == "checkpointed", plays
        assert notebook.must(CHECK).text == "intact\n", plays
        switches[plays] = False
        mode.double.set(**switches)
    mode.settled()


def a_forked_child_that_shares_the_context_is_named_until_it_has_ended(mode: NvidiaMode, notebook: Notebook) -> None:
    child = int(notebook.must(FORK).text)
    checkpoints = len(mode.calls("cuCheckpointProcessCheckpoint", mode.pid(notebook)))
    with pytest.raises(ConflictError, match=f"process {child} was forked by the kernel"):
        mode.suspend(notebook)
    assert len(mode.calls("cuCheckpointProcessCheckpoint", mode.pid(notebook))) == checkpoints
    assert notebook.must(f"os.close(release); os.waitpid(forked, 0)\n{CHECK}").text == "intact\n"
    mode.suspend(notebook)
    assert len(mode.calls("cuCheckpointProcessCheckpoint", mode.pid(notebook))) == checkpoints + 1
    assert notebook.must(CHECK).text == "intact\n"


def stopped_it_is_refused_at_once_by_its_pid(mode: NvidiaMode, notebook: Notebook) -> None:
    pid = mode.pid(notebook)
    locks = len(mode.calls("cuCheckpointProcessLock", pid))
    until(lambda: not mode.world.lease(notebook.kernel_id).busy, "the cell has ended")
    stop(pid)
    try:
        with pytest.raises(ConflictError, match=f"process {pid} is stopped.*kill -CONT {pid}"):
            mode.suspend(notebook)
        assert len(mode.calls("cuCheckpointProcessLock", pid)) == locks
    finally:
        os.kill(pid, signal.SIGCONT)
    mode.suspend(notebook)
    assert notebook.must(CHECK).text == "intact\n"


@pytest.mark.promise("hard-caps")
def test_without_the_drivers_limits_a_greedy_child_is_caught_by_the_sample(mode: NvidiaMode, server: Server) -> None:
    notebook = mode.start(server)
    notebook.must(fill(1))
    assert "took it" in notebook.must(GREEDY.format(mib=900, waits=False)).text
    used_mib = 900 + DATA_MIB + 2 * CONTEXT_MIB
    until(lambda: mode.world.lease(notebook.kernel_id).lease.used_mib >= used_mib, "the sample counts the child")
    until(lambda: any("cap" in line for line in mode.story(notebook)), "its user is warned")


# -- room ----------------------------------------------------------------------------------------------------------------------

STRANGER = """
from tests.driver_double import device
device.allocate({mib} << 20)
print("holding", flush=True)
input()
"""


@contextmanager
def stranger(mode: NvidiaMode, mib: int) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", STRANGER.format(mib=mib - CONTEXT_MIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=mode.world.environment,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield
    finally:
        process.communicate("\n")


def no_restore_is_tried_where_a_stranger_leaves_too_little_room(
    mode: NvidiaMode, notebook: Notebook, *, is_seen_before: bool
) -> None:
    """Either before the broker looks for room, or suddenly after it has."""
    pid = mode.pid(notebook)
    restores = len(mode.calls("cuCheckpointProcessRestore", pid))
    mode.suspend(notebook)
    free_mib = DATA_MIB + CONTEXT_MIB + 16  # room for what is saved, but not for the margin
    with stranger(mode, DEVICE_MIB - free_mib):
        if is_seen_before:
            until(lambda: mode.world.status().devices[0].stranger_mib > 0, "the broker sees the stranger")
        cell = notebook.send(CHECK)
        why = "processes without a lease use the rest" if is_seen_before else "MiB"
        until(lambda: mode.world.lease(notebook.kernel_id).position == 1, "the cell waits")
        until(lambda: any(why in line for line in waits(mode, notebook)), "it is said why")
        until(lambda: mode.world.status().devices[0].stranger_mib > 0, "the broker sees the stranger")
        mode.world.await_state(notebook.kernel_id, "suspended")  # a resume that found no room pauses for a moment
        assert len(mode.calls("cuCheckpointProcessRestore", pid)) == restores
    assert notebook.wait(cell).text == "intact\n"
    assert len(mode.calls("cuCheckpointProcessRestore", pid)) == restores + 1


def waits(mode: NvidiaMode, notebook: Notebook) -> list[str]:
    """Return what was reported about the kernel since it was suspended."""
    said = mode.story(notebook)
    last = max(index for index, line in enumerate(said) if "saved in host memory" in line)
    return [*said[last + 1 :], mode.world.lease(notebook.kernel_id).sentence]


# -- kills ---------------------------------------------------------------------------------------------------------------------


@on_each_driver
def test_turns_keep_every_byte_and_a_kill_at_any_step_of_one_loses_nothing(
    mode: NvidiaMode, server: Server, request: pytest.FixtureRequest
) -> None:
    driver = request.node.callspec.id
    pair = Pair(mode, server)
    for _ in range(2):
        pair.end_turn(pair.begin_turn())
        pair.saved()
    mode.settled()
    every = [(name, late, victim) for (name, late), victim in product(MOMENTS, VICTIMS)]
    for name, late, victim in every if ALL_KILLS else SAMPLE[driver]:
        with mode.held(CALLS[name], late=late) as await_held:
            cell = pair.begin_turn()
            await_held()
            pids = [pid for kind in VICTIMS[victim] for pid in getattr(mode, kind)()]
            assert pids, (name, late, victim)
            kill_all(pids)
        pair.end_turn(cell)
        mode.settled()
    pair.end_turn(pair.begin_turn())
    pair.saved()
    assert len(mode.brokers()) == len(mode.workers()) == 1
    one_that_outlives_its_callers_death_has_all_its_bytes(mode, pair.resident, request.node.callspec.indices["lent"])


# -- moves --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lent", [("580", 3)], indirect=True, ids=["580"])
def test_a_move_gives_the_driver_a_pair_for_every_device_and_loses_no_byte_and_an_old_driver_is_a_reason_to_stay(
    mode: NvidiaMode, server: Server
) -> None:
    notebook = mode.start(server)
    notebook.must(fill(1))
    pid = mode.pid(notebook)
    raw = [one.device_id.removeprefix("GPU-").replace("-", "") for one in mode.double.devices]
    assert mode.world.lease(notebook.kernel_id).lease.device_id == mode.double.devices[0].device_id
    for old, new, other in ((0, 1, 2), (1, 2, 0)):
        ids = [raw[index] for index in (old, new, other)]
        said = mode.world.command("move", mode.world.lease(notebook.kernel_id).lease_id, "--to", str(new))
        assert said.returncode == 0, said.stderr
        pairs = mode.calls("cuCheckpointProcessRestore", pid)[-1].arguments["pairs"]
        found = {pairs[at : at + 32]: pairs[at + 32 : at + 64] for at in range(0, len(pairs), 64)}
        assert found[ids[0]] == ids[1]
        assert set(found) == set(found.values()) == set(ids), "each device once on either side"
        assert mode.world.lease(notebook.kernel_id).lease.device_id == mode.double.devices[new].device_id
        (process,) = [one for one in mode.double.processes() if one.pid == pid]
        assert process.mib == {mode.double.devices[new].device_id: DATA_MIB + CONTEXT_MIB}
        assert notebook.must(CHECK).text == "intact\n"

    mode.serve("570", 3)  # which cannot move kernels
    home = mode.world.lease(notebook.kernel_id).lease.device_id
    said = mode.world.command("move", mode.world.lease(notebook.kernel_id).lease_id, "--to", "1")
    assert said.returncode == 1
    assert "install 580 or newer" in said.stderr, said.stderr
    assert notebook.must(CHECK).text == "intact\n"
    assert mode.world.lease(notebook.kernel_id).lease.device_id == home
