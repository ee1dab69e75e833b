"""Kernels that outlive their server: a new one finds them alive, with everything they had."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.stories import CHECK, fill
from tests.support.victims import kill_all, released
from tests.support.world import Notebook, Server, World, new_world, until

pytestmark = pytest.mark.promise("keep-kernels")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One broker for all tests of this file."""
    with new_world() as made:
        yield made


@pytest.fixture
def servers(world: World) -> Iterator["Servers"]:
    with ExitStack() as stack:
        yield Servers(world, stack)


class Servers:
    def __init__(self, world: World, stack: ExitStack) -> None:
        self.world = world
        self._stack = stack

    def start(self) -> Server:
        server = Server(
            self.world,
            "--ServerApp.kernel_manager_class=fractional_gpu.KeepingKernelManager",
            f"--SessionManager.database_filepath={self.world.folder / 'sessions.sqlite'}",
        )
        self._stack.callback(self._end, server)
        return server

    @staticmethod
    def _end(server: Server) -> None:
        if server.process.poll() is None:
            for kernel in server.request("GET", "api/kernels"):
                server.request("DELETE", f"api/kernels/{kernel['id']}")
        server.stop()


def records(world: World) -> list[Path]:
    return sorted((world.folder / "run").rglob("kept/*.json"))


def pid_of(notebook: Notebook) -> str:
    return notebook.must("%%cpu\nimport os; print(os.getpid())").text


def test_new_servers_find_the_kernels_that_live_whatever_ended_the_last_one(world: World, servers: Servers) -> None:
    """Resident and suspended ones, a notebook's through its session, and none that ended meanwhile; a later death is noticed as usual."""
    most, quarter = world.install(750, 250)
    old = servers.start()
    first, second, doomed = old.start(most), old.start(most), old.start(quarter)
    body = {"path": "n.ipynb", "name": "n.ipynb", "type": "notebook", "kernel": {"name": quarter}}
    session = old.request("POST", "api/sessions", body)
    of_session = old.connect(session["kernel"]["id"])
    of_session.must("%%cpu\nx = 41")
    first.must(fill(1))
    second.must(fill(2))
    world.await_state(first.kernel_id, "suspended")
    pids = {notebook.kernel_id: pid_of(notebook) for notebook in (first, second, of_session)}
    doomed_pid = int(pid_of(doomed))

    for end in (signal.SIGTERM, signal.SIGKILL):
        old.stop(end)
        assert {Path(path).stat().st_mode & 0o777 for path in records(world)} == {0o600}
        if end == signal.SIGTERM:
            kill_all([doomed_pid])
        new = servers.start()
        assert {kernel["id"] for kernel in new.request("GET", "api/kernels")} == set(pids)
        assert len(records(world)) == len(pids)
        (found,) = new.request("GET", "api/sessions")
        assert (found["id"], found["path"], found["kernel"]["id"]) == (session["id"], "n.ipynb", of_session.kernel_id)
        assert new.connect(of_session.kernel_id).must("%%cpu\nprint(x + 1)").text == "42\n"
        for kernel_id in (first.kernel_id, second.kernel_id):
            notebook = new.connect(kernel_id)
            assert notebook.must(CHECK).text == "intact\n"
            assert pid_of(notebook) == pids[kernel_id], "the very same process"
        old = new

    new.connect(first.kernel_id).restart()
    restarted = new.connect(first.kernel_id)  # an older connection may miss the new process's first messages
    assert pid_of(restarted) != pids[first.kernel_id]
    restarted.must(fill(3))
    pid = int(pids[second.kernel_id])
    kill_all([pid])
    again = new.connect(second.kernel_id)
    until(lambda: world.lease(second.kernel_id).pid not in (None, pid) or None, "Jupyter starts it again")
    assert again.must("%%cpu\nprint('back')").text == "back\n"
    for kernel_id in pids:
        new.connect(kernel_id).shut_down()
    until(lambda: released(world) or None, "leases and reservations are gone")
    assert records(world) == []


def test_no_server_takes_kernels_of_another_server_or_another_folder(world: World, servers: Servers) -> None:
    """Kernels that are not ours are still shut down with their server."""
    (name,) = world.install(250)
    first = servers.start()
    notebook = first.start(name)
    pid = int(pid_of(notebook))
    other = first.request("POST", "api/kernels", {"name": "python3", "path": ""})
    others_pid = int(first.connect(other["id"]).must("import os; print(os.getpid())").text)
    beside = servers.start()
    assert beside.request("GET", "api/kernels") == []
    first.stop()
    until(lambda: not Path(f"/proc/{others_pid}/environ").exists() or None, "it is shut down with its server")
    here = world.notebooks
    world.notebooks = world.folder / "elsewhere"
    world.notebooks.mkdir()
    assert servers.start().request("GET", "api/kernels") == []
    os.kill(pid, 0)
    world.notebooks = here
    (mine,) = servers.start().request("GET", "api/kernels")
    assert mine["id"] == notebook.kernel_id


def test_what_the_next_server_needs_is_put_back_and_a_kernel_is_managed_without_its_token(
    world: World, servers: Servers
) -> None:
    (name,) = world.install(750)
    old = servers.start()
    notebook = old.start(name)
    notebook.must(fill(1))
    pid = pid_of(notebook)
    before = [*records(world), *(world.folder / "run" / "gpu").glob("*.token")]
    assert len(before) == 2
    shutil.rmtree(world.folder / "run" / "gpu")
    until(lambda: all(path.exists() for path in before), "the record and the token are put back")
    assert {path.stat().st_mode & 0o777 for path in before} == {0o600}
    world.kill_broker()
    old.stop(signal.SIGKILL)
    before[1].unlink()  # no process there puts it back
    new = servers.start()
    (kernel,) = new.request("GET", "api/kernels")
    again = new.connect(kernel["id"])
    assert again.must(CHECK).text == "intact\n"
    assert pid_of(again) == pid
    again.restart()
    assert pid_of(again) != pid
    again.must(fill(2))
    assert again.must(CHECK).text == "intact\n"


def test_damaged_records_keep_no_server_from_its_start(world: World, servers: Servers) -> None:
    (name,) = world.install(250)
    old = servers.start()
    pids = [int(pid_of(old.start(name))) for _ in range(3)]
    old.stop()
    changes: list[dict[str, object]] = [{"connection": 1}, {"provisioner": 1}]
    changes.append(
        {"connection_file": str(world.folder / "removed" / "kernel.json")}
    )  # which cannot be written, and need not be
    for path, change in zip(records(world), changes, strict=True):
        path.write_text(json.dumps(json.loads(path.read_text()) | change) + "\n")
    new = servers.start()
    (found,) = new.request("GET", "api/kernels")
    pids.remove(int(pid_of(new.connect(found["id"]))))
    for pid in pids:
        os.kill(pid, 0)
    kill_all(pids)
