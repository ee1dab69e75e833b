"""A lease, and its token's file, go when its kernel ends and no process is left that could restart it."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from fractional_gpu.broker.persistence.lease_files import remove_token_file
from fractional_gpu.broker.recovery.recovery import kernel_of
from fractional_gpu.broker.supervision.survivors import AbandonedLeases, has_lost_server
from fractional_gpu.core.model import LeaseState
from fractional_gpu.host.process import identify
from tests.broker.live import LiveBroker, started_for
from tests.broker.recovery.test_recovery import record_of
from tests.support.world import until

pytestmark = pytest.mark.promise("abandoned")

# Asks for a lease; then, for each line it reads, attaches or detaches the process described there.
SERVER = """
import json, sys
from pathlib import Path
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.messages import AttachRequest, LeaseRequest
with BrokerClient(sys.argv[1]) as client:
    lease = client.create_lease(LeaseRequest(fraction_milli=250))
    client.token = lease.token
    print(json.dumps([lease.lease_id, lease.token]), flush=True)
    for line in sys.stdin:
        client.attach(lease.lease_id, AttachRequest(**json.loads(line)))
        print("attached", flush=True)
"""


class _Server:
    """A program that takes a lease and attaches processes to it."""

    def __init__(self, live: LiveBroker) -> None:
        argv = [sys.executable, "-c", SERVER, live.socket]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lease_id, self.token = json.loads(self._said())

    def attach(self, process: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(process) + "\n")
        self._process.stdin.flush()
        assert self._said() == "attached\n"

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def _kernel(server: _Server, tmp_path: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Return a process of the server's lease, and the file with its token."""
    token_file = tmp_path / f"{server.lease_id}-1f.token"
    token_file.write_text(server.token)
    with started_for(server.lease_id, environment={"JUPYTER_GPU_TOKEN_FILE": str(token_file)}) as process:
        yield process, token_file


def _kill(process: dict[str, Any]) -> None:
    pidfd = os.pidfd_open(process["pid"])
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [])
    finally:
        os.close(pidfd)


def _has_ended(live: LiveBroker, lease_id: str) -> bool:
    return live.call("GET", f"/v1/leases/{lease_id}").status == 404


def _look(live: LiveBroker) -> None:
    live.on_loop(AbandonedLeases(live.broker).look)


def _await_exit(live: LiveBroker, lease_id: str) -> None:
    until(lambda: live.state(lease_id) == "unattached" or None, "the broker saw the process end")


def test_a_lease_ends_with_its_kernel_when_its_server_has_ended(live: LiveBroker, tmp_path: Path) -> None:
    with _Server(live) as server, _kernel(server, tmp_path) as (process, token_file):
        server.attach(process)
        server.kill()
        _look(live)
        assert live.state(server.lease_id) == "unarmed", "the kernel runs"
        _kill(process)
        until(lambda: _has_ended(live, server.lease_id) or None, "the lease has ended")
        until(lambda: not token_file.exists() or None, "the token's file is gone")


def test_a_lease_ends_with_its_server_when_its_kernel_has_ended(live: LiveBroker, tmp_path: Path) -> None:
    with _Server(live) as server, _kernel(server, tmp_path) as (process, token_file):
        server.attach(process)
        _kill(process)
        _await_exit(live, server.lease_id)
        _look(live)
        assert live.state(server.lease_id) == "unattached", "the server may start the kernel again"
        assert token_file.exists()
        server.kill()
        _look(live)
        assert _has_ended(live, server.lease_id)
        until(lambda: not token_file.exists() or None, "the token's file is gone")


def test_a_server_that_attaches_the_kernel_again_has_taken_it_over(live: LiveBroker, tmp_path: Path) -> None:
    with _Server(live) as server, _kernel(server, tmp_path) as (process, _):
        server.attach(process)
        answer = live.call("POST", f"/v1/leases/{server.lease_id}/attach", process, token=server.token)
        assert answer.status == 200
        server.kill()
        _kill(process)
        _await_exit(live, server.lease_id)
        _look(live)
        assert live.state(server.lease_id) == "unattached", "this process may start the kernel again"


def test_a_lease_that_was_never_attached_ends_with_its_server_unless_a_process_carries_it(live: LiveBroker) -> None:
    with _Server(live) as server:
        with started_for(server.lease_id):
            server.kill()
            _look(live)
            assert live.state(server.lease_id) == "unattached", "it may run as the kernel"
        _look(live)
        assert _has_ended(live, server.lease_id)


@pytest.mark.parametrize("name", ["other.token", "lease", "lease-1.json", "."])
def test_only_a_token_of_the_lease_is_removed(tmp_path: Path, name: str) -> None:
    kept, removed = tmp_path / name, tmp_path / "lease-2.token"
    for path in {kept, removed} - {tmp_path}:
        path.write_text("text")
    remove_token_file("lease", str(kept), os.getuid())
    remove_token_file("lease", "", os.getuid())
    remove_token_file("lease", str(tmp_path / "nowhere" / "lease-3.token"), os.getuid())
    remove_token_file("lease", str(removed), os.getuid())
    assert kept.exists()
    assert not removed.exists()


@pytest.mark.parametrize("trap", ["a link", "a folder that others write to", "another user's folder"])
def test_a_token_is_removed_from_no_folder_of_others(tmp_path: Path, trap: str) -> None:
    folder, uid = tmp_path / "folder", os.getuid()
    folder.mkdir(mode=0o700)
    (folder / "lease-1.token").write_text("text")
    path = folder / "lease-1.token"
    if trap == "a link":
        (tmp_path / "link").symlink_to(folder)
        path = tmp_path / "link" / "lease-1.token"
    elif trap == "a folder that others write to":
        folder.chmod(0o777)
    elif uid == 0:
        os.chown(folder, 65534, 65534)
    else:
        uid += 1
    remove_token_file("lease", str(path), uid)
    assert (folder / "lease-1.token").exists()


def test_the_server_of_a_lease_is_known_after_a_restart_of_the_broker() -> None:
    alive = identify(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as ended:
        gone = identify(ended.pid)
        ended.kill()
    for server in (None, alive, gone):
        kernel = kernel_of(record_of(None, LeaseState.UNATTACHED, server=server, token_file="/f"))  # noqa: S106 - a path
        assert (kernel.launch.server, has_lost_server(kernel), kernel.launch.token_file) == (
            server,
            server == gone,
            "/f",
        )
