"""Processes in separate namespaces: pids, folders and networks, with real namespaces."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fractional_gpu.host.namespaces import (
    in_network,
    namespace_of,
    nested_pids,
    open_network,
    own_identity,
    own_namespace,
    pid_meant_by,
    shows_same_folder,
)
from fractional_gpu.host.process import identify
from tests.support.world import until

pytestmark = pytest.mark.promise("namespaces")

CHILD = "import os; print(os.getpid(), flush=True); open(0).read()"


@contextmanager
def inside(flags: Sequence[str], program: str = CHILD, *words: str) -> Iterator[tuple[int, list[str]]]:
    """A Python process in namespaces: its pid here, and the words of the line that it says."""
    fork = ["--fork", "--kill-child"] if "--pid" in flags else []
    with subprocess.Popen(
        ["unshare", *flags, *fork, sys.executable, "-S", "-c", program, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        try:
            yield int(children[0]) if fork else process.pid, said
        finally:
            process.kill()


def test_a_pid_means_a_process_of_its_senders_namespace() -> None:
    with inside(["--pid", "--mount-proc"]) as (one, said), inside(["--pid", "--mount-proc"]) as (other, _):
        assert said == ["1"]
        assert nested_pids(one) == [one, 1]
        assert (pid_meant_by(one, 1), pid_meant_by(other, 1)) == (one, other)
        with pytest.raises(ProcessLookupError, match="in the caller's pid namespace"):
            pid_meant_by(one, os.getpid())
    assert pid_meant_by(os.getpid(), 12345678) == 12345678, "in our own namespace a pid is what it is"


def test_a_process_further_down_has_a_pid_in_each_namespace_above() -> None:
    nested = """
import subprocess, sys
child = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; read _"], stdin=0, stdout=subprocess.PIPE)
child.stdout.readline()
inner = open(f"/proc/{child.pid}/task/{child.pid}/children").read().split()[0]
print(inner, flush=True)
child.wait()
"""
    with inside(["--pid", "--mount-proc"], nested) as (outer, (inner,)):
        here = pid_meant_by(outer, int(inner))
        assert nested_pids(here) == [here, int(inner), 1]
        assert namespace_of(here, "pid") != namespace_of(outer, "pid")
        with pytest.raises(ProcessLookupError):
            pid_meant_by(here, int(inner))  # from further down, the number means nothing


def test_a_process_knows_itself_where_proc_is_another_namespaces() -> None:
    ask = """
import os, sys
sys.path[:0] = sys.argv[1:]
from fractional_gpu.host.namespaces import own_identity
from fractional_gpu.host.process import identify
from tests.support.world import until
found = own_identity(os.getpid(), identify)
print(found.pid, found.start_time, flush=True)
open(0).read()
"""
    with inside(["--pid"], ask, *sys.path) as (here, (pid, start)):
        assert (int(pid), int(start)) == (1, identify(here).start_time)
    assert own_identity(os.getpid(), identify) == identify(os.getpid())


def test_what_runs_in_another_network_leaves_every_other_thread_where_it_was() -> None:
    with inside(["--net"]) as (pid, _):
        opened = open_network(identify(pid))
        assert opened is not None
        descriptor, namespace = opened
        before, threads = own_namespace("net"), set(threading.enumerate())

        def look() -> tuple[tuple[int, int], list[tuple[int, str]]]:
            return own_namespace("net"), socket.if_nameindex()

        seen, interfaces = in_network(descriptor, look)
        assert seen == namespace == namespace_of(pid, "net")
        assert [name for _, name in interfaces] == ["lo"]
        assert own_namespace("net") == before
        assert set(threading.enumerate()) <= threads
        until(lambda: namespaces_of_threads() == {before}, "the thread is gone for the system, too")
        with pytest.raises(ZeroDivisionError):
            in_network(descriptor, lambda: 1 // 0)
        os.close(descriptor)
    assert open_network(identify(os.getpid())) is None


def namespaces_of_threads() -> set[tuple[int, int]]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            status = (task / "ns" / "net").stat()
            found.add((status.st_dev, status.st_ino))
    return found


def test_without_the_right_to_enter_it_says_so() -> None:
    """Without CAP_SYS_ADMIN, as a broker of a user is."""
    enter = """
import os, sys
sys.path[:0] = sys.argv[2:]
from fractional_gpu.host.namespaces import in_network, open_network
from fractional_gpu.host.process import identify
from tests.support.world import until
descriptor, _ = open_network(identify(int(sys.argv[1])))
try:
    in_network(descriptor, lambda: None)
except PermissionError:
    print("refused", flush=True)
"""
    with inside(["--net"]) as (pid, _):
        less = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-S", "-c", enter]
        done = subprocess.run([*less, str(pid), *sys.path], capture_output=True, text=True, check=True)
        assert done.stdout == "refused\n"


def test_a_folder_is_the_same_only_where_the_mounts_show_the_same(tmp_path: Path) -> None:
    (tmp_path / "covered").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    cover = f"""
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "none", {str(tmp_path / "covered")!r}], check=True)
print(flush=True)
open(0).read()
"""
    with inside(["--mount"], cover) as (pid, _):
        assert shows_same_folder(pid, tmp_path)
        assert not shows_same_folder(pid, tmp_path / "covered")
        with pytest.raises(OSError, match=r"Not a directory|symbolic"):
            shows_same_folder(pid, tmp_path / "link")  # it would lead into our own files
    assert shows_same_folder(os.getpid(), tmp_path)


def test_a_process_that_has_ended_is_an_error() -> None:
    with inside([]) as (pid, _):
        identity = identify(pid)
    for ask in (lambda: namespace_of(pid, "net"), lambda: nested_pids(pid), lambda: open_network(identity)):
        with pytest.raises(ProcessLookupError):
            ask()
