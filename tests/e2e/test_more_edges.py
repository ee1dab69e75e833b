"""Difficult users and an overloaded machine: leases taken away, few descriptors, little host memory, kernels within kernels."""

import contextlib
import json
import os
import re
import resource
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fractional_gpu.ledger.ledger import Ledger
from tests.support.kept import Kept
from tests.support.pair import Pair, new_pair
from tests.support.stories import BLOCKED, CHECK, UNINTERRUPTIBLE, fill
from tests.support.world import Notebook, Server, World, until

POOL = min(
    32, (os.cpu_count() or 1) + 4
)  # asyncio's threads for blocking calls, which start one by one as they are needed
LOOKING = """
class Touching:
    __doc__ = property(lambda self: str(buffer.read(1)))
touching = Touching()
"""

# A thread that keeps the GIL, as one blocked in CUDA may: the kernel can neither report that nor do anything else.
STUCK = """
import ctypes, os, threading, time
def be_stuck():
    while not os.path.exists("stuck"):
        time.sleep(0.01)
    ctypes.PyDLL(None).system(b"while [ -e stuck ]; do sleep 0.5; done")
threading.Thread(target=be_stuck, daemon=True).start()
"""


@pytest.fixture(scope="module")
def kept_pair() -> Iterator[Kept[Pair]]:
    with Kept(
        partial(new_pair, "c.GPUBroker.pools = {'default': {'retry_refused': '1s', 'preempt': 'never'}}")
    ) as kept:
        yield kept


def occupy(notebook: Notebook, world: World) -> str:
    cell = notebook.send("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    until(lambda: world.lease(notebook.kernel_id).busy, "the neighbour is busy")
    return cell


def sentence(notebook: Notebook) -> str:
    while True:
        text = str(json.loads(notebook.socket.recv())["content"].get("data", {}).get("text/plain", ""))
        if "is waiting for the GPU" in text:
            return text


def threads_and_files(pid: int) -> tuple[int, int]:
    return len(list(Path(f"/proc/{pid}/task").iterdir())), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def time_spent_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_kib(pid: int) -> int:
    """A process's private memory, without memory shared with files."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def test_a_resume_that_is_given_up_leaves_a_blocked_kernel_its_place(pair: Pair) -> None:
    world = pair.world
    first, second = pair.ready(LOOKING)
    busy = occupy(second, world)
    looks = threading.Thread(
        target=first.ask, args=("inspect_request", {"code": "touching", "cursor_pos": 8, "detail_level": 0})
    )
    looks.start()
    until(lambda: world.lease(first.kernel_id).position, "the broker speaks for the kernel that is blocked")
    lease_id = world.lease(first.kernel_id).lease_id
    with socket.socket(socket.AF_UNIX) as line:  # `jupyter gpu resume`, and Control-C
        line.connect(world.socket)
        line.sendall(
            f"POST /v1/leases/{lease_id}/resume HTTP/1.1\r\nHost: broker\r\nContent-Length: 0\r\n\r\n".encode()
        )
        with contextlib.suppress(TimeoutError):
            line.settimeout(0.5)
            line.recv(1)
    assert world.lease(first.kernel_id).position == 1
    (world.notebooks / "go").touch()
    assert second.wait(busy).status == "ok"
    looks.join()
    assert first.must(CHECK).text == "intact\n"


@pytest.mark.promise("race-interrupt")
def test_an_interrupted_kernel_that_is_blocked_goes_before_those_that_wait(pair: Pair) -> None:
    world = pair.world
    third, second = pair.ready()
    first = pair.server.start(pair.spec)
    first.must(UNINTERRUPTIBLE + fill(1))
    assert second.must(CHECK).text == "intact\n"
    busy = occupy(second, world)
    waits = third.send(CHECK)
    until(lambda: world.lease(third.kernel_id).position == 1, "the third one waits")
    blocked = first.send(BLOCKED)
    until((world.notebooks / "blocked").exists, "the first one is blocked")
    interrupt = threading.Thread(target=first.interrupt)
    interrupt.start()
    until(lambda: world.lease(first.kernel_id).position == 1, "the first one has a place")
    assert world.lease(third.kernel_id).position == 2
    (world.notebooks / "go").touch()
    assert second.wait(busy).status == "ok"
    assert first.wait(blocked).error.startswith("KeyboardInterrupt")
    interrupt.join()
    assert third.wait(waits).text == "intact\n"
    assert first.must(CHECK).text == "intact\n"


@pytest.mark.promise("race-lost-lease")
def test_a_cell_that_waits_is_told_when_its_lease_is_taken_away(pair: Pair) -> None:
    world = pair.world
    first, second = pair.ready()
    busy = occupy(second, world)
    cell = first.send(CHECK)
    assert f"{world.lease(second.kernel_id).spec.label} is running a cell" in sentence(first)
    with world.client() as client:
        client.release(world.lease(first.kernel_id).lease_id)
    answer = first.wait(cell)
    assert answer.status == "error"
    assert "restart the kernel" in answer.error
    assert "restart the kernel" in first.run(CHECK).error
    (world.notebooks / "go").touch()
    assert second.wait(busy).status == "ok"
    first.restart()
    first.must(fill(3))
    assert first.must(CHECK).text == "intact\n"
    assert second.must(CHECK).text == "intact\n"


def _stories(reader: sqlite3.Connection, lease_id: str) -> list[str]:
    return [sentence for (sentence,) in reader.execute("SELECT sentence FROM story WHERE lease_id = ?", (lease_id,))]


def test_what_is_long_over_is_forgotten(world: World) -> None:
    path = world.ledger
    now_ms = time.time_ns() // 1_000_000
    with Ledger.open(path) as ledger:
        ledger.record("old", now_ms - 100 * 24 * 3_600_000, "test", "a hundred days ago")
        ledger.record("young", now_ms - 10 * 24 * 3_600_000, "test", "ten days ago")
    world.start_broker()  # removes it in a separate task
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as reader:
        until(lambda: not _stories(reader, "old"), "a ledger without what ended a hundred days ago")
        assert _stories(reader, "young") == ["ten days ago"]


@pytest.mark.promise("race-fork")
def test_a_kernel_started_by_a_kernel_has_a_share_of_its_own(world: World, server: Server) -> None:
    (name,) = world.install(500)
    outer = server.start(name)
    outer.must(fill(1))
    outer.must(
        "from jupyter_client.manager import start_new_kernel\n"
        f"manager, client = start_new_kernel(kernel_name={name!r})\n"
        f"client.execute_interactive({fill(2)!r})"
    )
    leases = {lease.lease_id: lease for lease in world.status().leases}
    assert len(leases) == 2
    inner_id = next(one for one, lease in leases.items() if lease.kernel_id != outer.kernel_id)
    assert leases[inner_id].state == "resident"
    outer.must("%gpu suspend")
    world.await_state(outer.kernel_id, "suspended")
    inner = next(lease for lease in world.status().leases if lease.lease_id == inner_id)
    assert (inner.state, inner.suspends) == ("resident", 0)
    outer.must(f"reply = client.execute_interactive({CHECK!r})\nassert reply['content']['status'] == 'ok', reply")
    outer.must("client.stop_channels()\nmanager.shutdown_kernel()")
    assert [lease.kernel_id for lease in world.status().leases] == [outer.kernel_id]
    assert outer.must(CHECK).text == "intact\n"


@pytest.mark.promise("race-fork")
def test_a_suspended_kernel_may_fork(pair: Pair) -> None:
    first, second = pair.ready()
    answer = first.must(
        "%%cpu\n"
        "import multiprocessing\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))"
    )
    assert answer.text == "[1, 2]\n"
    assert pair.world.lease(first.kernel_id).state == "suspended"
    assert first.must(CHECK).text == "intact\n"
    assert second.must(CHECK).text == "intact\n"


@pytest.mark.promise("race-stuck")
def test_a_suspended_kernel_whose_python_is_stuck_gets_its_memory_back(pair: Pair) -> None:
    first, second = pair.ready(STUCK)
    stuck = pair.world.notebooks / "stuck"
    stuck.touch()
    pair.world.await_state(first.kernel_id, "resident")
    stuck.unlink()
    assert first.must(CHECK).text == "intact\n"
    assert second.must(CHECK).text == "intact\n"


def test_turns_leave_nothing_behind_in_kernels_and_broker(pair: Pair) -> None:
    turns = int(os.environ.get("TURNS", "6"))
    world = pair.world
    first, second = pair.ready()
    broker = world.broker_pid()
    assert broker is not None
    pids = [broker, *(int(one.must("import os; print(os.getpid())").text) for one in (first, second))]

    def take_turns(count: int) -> None:
        for _ in range(count):
            for notebook in (first, second):
                assert notebook.must(CHECK).text == "intact\n"

    take_turns(2)
    before = [threads_and_files(pid) for pid in pids]
    memory = [resident_kib(pid) for pid in pids]
    take_turns(turns // 2)

    def settled() -> bool:
        now = [threads_and_files(pid) for pid in pids]
        return all(a[0] <= b[0] + POOL and a[1] <= b[1] for a, b in zip(now, before, strict=True))

    until(settled, f"threads and descriptors are {before} again", deadline_s=60)
    grown = [resident_kib(pid) - was for pid, was in zip(pids, memory, strict=True)]
    assert max(grown) < 8 * 1024 + 64 * turns, f"broker, first and second kernel grew by {grown} KiB"


def test_a_broker_without_descriptors_lives_and_recovers(pair: Pair) -> None:
    world = pair.world
    first, second = pair.ready()
    broker = world.broker_pid()
    assert broker is not None
    limits = resource.prlimit(broker, resource.RLIMIT_NOFILE)
    has = threads_and_files(broker)[1]
    resource.prlimit(broker, resource.RLIMIT_NOFILE, (has + 4, limits[1]))
    with contextlib.ExitStack() as stack:
        for _ in range(32):
            line = stack.enter_context(socket.socket(socket.AF_UNIX))
            line.connect(world.socket)
        until(lambda: threads_and_files(broker)[1] >= has + 4, "no descriptor is left")
        cell = first.send(CHECK)
        until(lambda: "cannot accept connections" in world.logs()["broker.log"], "the broker says so")
        until(lambda: "cannot sample the devices" in world.logs()["broker.log"], "the broker cannot look")
        spent_s = time_spent_s(broker)
        # Of equal lines three are written, then one a minute.
        until(lambda: world.logs()["broker.log"].count("cannot sample the devices") >= 3, "it looks again")
        until(lambda: world.logs()["broker.log"].count("cannot accept connections") >= 3, "it tries again")
        assert time_spent_s(broker) - spent_s < 1.0, "it spins"
        resource.prlimit(broker, resource.RLIMIT_NOFILE, limits)
    assert first.wait(cell).text == "intact\n"
    assert second.must(CHECK).text == "intact\n"
    assert world.broker_pid() == broker


def test_a_broker_for_other_devices_does_not_take_over_suspended_kernels(pair: Pair) -> None:
    first, second = pair.ready()
    pair.world.kill_broker()
    for simulate in ("2x1GiB", "1x2GiB"):
        other = subprocess.run(
            [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "broker", "--detach"]  # noqa: RUF005 - two short lines
            + ["--socket", pair.world.socket, "--simulate", simulate],
            env=pair.world.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert other.returncode == 1, (simulate, other)
    assert first.must(CHECK).text == "intact\n"
    assert second.must(CHECK).text == "intact\n"
