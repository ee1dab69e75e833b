"""Promises of fractional_gpu.host.process, kept with real processes where the kernel can be made to do the thing."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fractional_gpu.host.process import (
    ProcessIdentity,
    boot_id,
    environment_value,
    identify,
    is_alive,
    kill_marked,
    open_pidfd,
    owner_uid,
    parse_stat,
    read_environment,
    read_stat,
)
from tests.support.stopping import stop

STAT_TAIL = b"S 10 20 30 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 %d 0 777 1000 50"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its standard input to close and inherits one variable of note."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "NOTE": "a=b c"},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has been exec'ed by now
        yield process
        process.kill()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_for_exit_without_reaping(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_running_process_is_identified_and_alive(child: subprocess.Popen[bytes]) -> None:
    identity = identify(child.pid)
    assert identity == identify(child.pid)
    assert identity.boot_id == boot_id()
    assert identity.start_time >= identify(os.getpid()).start_time
    assert is_alive(identity)


def test_a_zombie_is_not_alive_and_cannot_be_identified(child: subprocess.Popen[bytes]) -> None:
    identity = identify(child.pid)
    child.kill()
    wait_for_exit_without_reaping(child.pid)
    assert not is_alive(identity)
    with pytest.raises(ProcessLookupError, match=f"process {child.pid} .* has exited"):
        identify(child.pid)


def test_a_reaped_process_is_not_alive(child: subprocess.Popen[bytes]) -> None:
    identity = identify(child.pid)
    child.kill()
    child.wait()
    assert not is_alive(identity)
    with pytest.raises(ProcessLookupError):
        identify(child.pid)
    with pytest.raises(ProcessLookupError):
        owner_uid(child.pid)
    with pytest.raises(ProcessLookupError):
        environment_value(child.pid, "NOTE")
    with pytest.raises(ProcessLookupError):
        open_pidfd(identity)


@pytest.mark.promise("race-pids")
@pytest.mark.parametrize("change", ["boot_id", "start_time"])
def test_another_incarnation_of_the_pid_is_not_the_process(child: subprocess.Popen[bytes], change: str) -> None:
    identity = identify(child.pid)
    other = ProcessIdentity(
        "another-boot" if change == "boot_id" else identity.boot_id,
        identity.pid,
        identity.start_time + (change == "start_time"),
    )
    assert is_alive(identity)
    assert not is_alive(other)
    before = open_descriptors()
    with pytest.raises(ProcessLookupError, match="is gone"):
        open_pidfd(other)
    assert open_descriptors() <= before


def test_a_pidfd_tells_of_the_exit(child: subprocess.Popen[bytes]) -> None:
    descriptor = open_pidfd(identify(child.pid))
    try:
        assert select.select([descriptor], [], [], 0)[0] == []
        child.kill()
        assert select.select([descriptor], [], [], 60)[0] == [descriptor]
    finally:
        os.close(descriptor)


def test_a_thread_id_is_refused_with_the_process_it_belongs_to() -> None:
    with ThreadPoolExecutor(1) as living:
        tid = living.submit(threading.get_native_id).result()
        with pytest.raises(ValueError, match=f"{tid} is a thread of process {os.getpid()}"):
            identify(tid)


@pytest.mark.parametrize("pid", [0, -1])
def test_a_pid_that_is_not_positive_is_no_process(pid: int) -> None:
    with pytest.raises(ProcessLookupError, match="positive"):
        identify(pid)


def test_an_environment_that_may_not_be_read_is_an_error_not_an_absence(tmp_path: Path) -> None:
    folder = tmp_path / "42"
    folder.mkdir()
    (folder / "environ").mkdir()  # reading it fails with something else than "not found", even for root
    with pytest.raises(IsADirectoryError):
        read_environment(42, proc=tmp_path)


@pytest.mark.parametrize("comm", ["python3", "a b", "a) R 1 (b", ")", "((", "new\nline", "\u00e9"])
def test_any_name_of_a_command_is_parsed(comm: str) -> None:
    stat = parse_stat(b"7 (" + comm.encode() + b") " + STAT_TAIL % 1)
    assert (stat.pid, stat.comm, stat.state, stat.ppid, stat.session) == (7, comm, "S", 10, 30)
    assert (stat.start_time, stat.kernel_thread, stat.dead) == (777, False, False)


@pytest.mark.parametrize("name", ["x\rUid:\t4242", "x\rTgid:\t1", "x\vUid:\t9\f"])
def test_a_real_process_cannot_name_itself_another_users(name: str) -> None:
    code = f"import sys; open('/proc/self/comm', 'w', newline='').write({name!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (owner_uid(process.pid), identify(process.pid).pid) == (os.getuid(), process.pid)
        process.kill()


@pytest.mark.parametrize(
    ("state", "threads", "dead"), [(b"Z", 1, True), (b"X", 0, True), (b"Z", 3, False), (b"T", 1, False)]
)
def test_a_leader_that_left_its_threads_behind_is_not_dead(state: bytes, threads: int, dead: bool) -> None:
    assert parse_stat(b"7 (x) " + state + (STAT_TAIL % threads)[1:]).dead is dead


def test_a_stopped_process_is_alive_and_held_up(child: subprocess.Popen[bytes]) -> None:
    identity = identify(child.pid)
    assert not read_stat(child.pid).stopped_or_traced
    stop(child.pid)
    assert is_alive(identity)
    assert read_stat(child.pid).stopped_or_traced


def test_only_processes_with_the_variable_are_killed() -> None:
    def sleeper(value: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["/bin/sleep", "600"], env={"MARKED_FOR_A_TEST": value})

    meant, other = sleeper("this"), sleeper("that")
    try:
        assert kill_marked("MARKED_FOR_A_TEST", "this") == [meant.pid]
        assert meant.wait(60) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (meant, other):
            process.kill()
            process.wait(60)
