"""Two nodes with one home on NFS, in real processes: each has a separate broker, socket, ledger and kernel records, but one kernelspec.

A node is a set of processes that see another machine's id, host name, /var/tmp and list of mounts (`sitecustomize`).
"""

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.stories import CHECK, fill
from tests.support.world import Server, World, new_world

pytestmark = pytest.mark.promise("shared-home")

_NODE = """
import socket
from pathlib import Path

import quick_start  # which this file hides
from fractional_gpu.client import state_folder

state_folder._MACHINE_ID = Path({folder!r}, "machine-id")
state_folder._MOUNTS = Path({folder!r}, "mountinfo")
state_folder._VAR_TMP = Path({folder!r}, "vartmp")
socket.gethostname = lambda: {name!r}
"""
_PLACES = (
    "from fractional_gpu.client.discovery import socket_path; from fractional_gpu.client.state_folder import state_folder; "
    "path = socket_path(); print(path, state_folder(path))"
)


def node(home: World, folder: Path, name: str) -> World:
    """Return the world of a node: its processes share the home's folders with those of the others, on a network filesystem."""
    (folder / "vartmp").mkdir(parents=True)
    (folder / "machine-id").write_text("a" * 32)
    (folder / "mountinfo").write_text(
        f"1 0 8:1 / / rw - ext4 disk rw\n2 1 0:5 / {home.folder} rw - nfs4 server:/home rw\n"
    )
    (folder / "sitecustomize.py").write_text(_NODE.format(folder=str(folder), name=name))
    one = copy.copy(home)
    one.environment = {
        **{key: value for key, value in home.environment.items() if key != "JUPYTER_GPU_SOCKET"},
        "PYTHONPATH": f"{folder}{os.pathsep}{home.environment['PYTHONPATH']}",
    }
    one.socket = places(one)[0]
    return one


def places(one: World) -> tuple[str, Path]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PLACES], env=one.environment, capture_output=True, text=True, check=True
    )
    socket, state = done.stdout.split()
    return socket, Path(state)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[World, World]]:
    """Two nodes that booted the same image, and so have the same machine id."""
    with new_world() as home, ExitStack() as brokers:
        pair = node(home, tmp_path / "a", "node-a"), node(home, tmp_path / "b", "node-b")
        for one in pair:
            brokers.callback(one.end_broker)
        yield pair


def test_two_nodes_with_one_home_do_not_meet(nodes: tuple[World, World], tmp_path: Path) -> None:
    first, second = nodes
    (name,) = first.install(250)
    with Server(first) as here, Server(second) as there:
        mine, theirs = here.start(name), there.start(name)
        mine.must(fill(1, 24))
        theirs.must(fill(2, 24))
        pids = first.broker_pid(), second.broker_pid()
        assert None not in pids
        assert len({first.socket, second.socket}) == len(set(pids)) == 2
        for one, kernel, place in ((first, mine, "a"), (second, theirs, "b")):
            assert [lease.kernel_id for lease in one.status().leases] == [kernel.kernel_id]
            state = places(one)[1]
            assert state.is_relative_to(tmp_path / place / "vartmp"), "the ledger is on the node's own disk"
            assert (state / "ledger-simulated.sqlite").exists()
        first.kill_broker()
        assert second.broker_pid() == pids[1]
        assert mine.must(CHECK).text == "intact\n"
        first.start_broker()
        assert first.broker_pid() not in (None, *pids)
        assert [lease.kernel_id for lease in first.status().leases] == [mine.kernel_id], "it took its own lease back"
        assert second.broker_pid() == pids[1], "nothing that the other node did replaced its socket"
        assert theirs.must(CHECK).text == "intact\n"

    # A node's leftover socket does not belong to another node: all kernels ended with their servers.
    pid = first.broker_pid()
    assert pid is not None
    first.end(pid, signal.SIGKILL)
    assert Path(first.socket).exists(), "it was killed"
    assert first.broker_pid() is None
    assert second.broker_pid() is not None
    second.start_broker()
    assert first.broker_pid() is None, "a start on the second node starts none on the first"
