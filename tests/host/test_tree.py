"""Promises of fractional_gpu.host.process, with real families of processes and, for scale and races, a made-up /proc."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fractional_gpu.host.process import ProcessIdentity, identify, scan

MARKER = "JUPYTER_GPU_LEASE"
# Other tests on this machine start kernels with leases, too.
LEASE_1, LEASE_2 = (f"lease-of-{os.getpid()}-{number}" for number in (1, 2))

# Starts a child, one in a separate session, and an orphan (its parent ends at once); prints their pids and waits.
FAMILY = """
import os, subprocess, sys
wait = [sys.executable, "-c", "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"]
def start(**options):
    process = subprocess.Popen(wait, stdin=sys.stdin, stdout=subprocess.PIPE, text=True, **options)
    return process, int(process.stdout.readline())
child, child_pid = start()
session, session_pid = start(start_new_session=True)
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, str(start()[1]).encode())
    os._exit(0)
os.wait()
print(child_pid, session_pid, int(os.read(read, 20)), flush=True)
sys.stdin.read()
"""


class Family:
    """A root with its kin; closing its standard input ends them all."""

    def __init__(self, *, session: bool, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAMILY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=session,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        self.child, self.in_new_session, self.orphan = map(int, self.process.stdout.readline().split())
        self.root = identify(self.process.pid)

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture
def family() -> Iterator[Callable[..., Family]]:
    families: list[Family] = []

    def start(*, session: bool = True, **environment: str) -> Family:
        families.append(Family(session=session, environment=environment))
        return families[-1]

    yield start
    for one in families:
        one.close()


def pids(identities: list[ProcessIdentity]) -> list[int]:
    return [identity.pid for identity in identities]


def test_descendants_and_members_of_the_session_belong_to_the_tree(family: Callable[..., Family]) -> None:
    one = family()
    tree = scan().tree(one.root)
    assert set(pids(tree)) == {one.root.pid, one.child, one.in_new_session, one.orphan}
    assert tree[0] == one.root
    assert [identity.start_time for identity in tree] == sorted(identity.start_time for identity in tree)


def test_an_orphan_outside_of_the_session_is_found_by_its_marker_only(family: Callable[..., Family]) -> None:
    one = family(session=False, **{MARKER: LEASE_1})
    assert one.orphan not in pids(scan().tree(one.root))
    assert one.orphan in pids(scan(MARKER).tree(one.root, LEASE_1))
    assert one.orphan not in pids(scan(MARKER).tree(one.root, LEASE_2))


def test_a_tree_holds_nothing_of_another(family: Callable[..., Family]) -> None:
    one, two = family(**{MARKER: LEASE_1}), family(**{MARKER: LEASE_2})
    snapshot = scan(MARKER)
    first, second = (snapshot.tree(a.root, lease) for a, lease in ((one, LEASE_1), (two, LEASE_2)))
    assert not set(first) & set(second)
    assert len(first) == len(second) == 4
    assert os.getpid() not in pids(first)


def test_marked_processes_of_another_user_do_not_count(family: Callable[..., Family]) -> None:
    one = family(session=False, **{MARKER: LEASE_1})
    tree = scan(MARKER).tree(one.root, LEASE_1, uid=os.getuid() + 1)
    assert one.orphan not in pids(tree)
    assert one.child in pids(tree)  # a descendant, of any user


def test_what_a_dead_root_left_behind_is_found_for_its_user(family: Callable[..., Family]) -> None:
    one = family(**{MARKER: LEASE_1})
    one.process.kill()
    one.process.wait()
    snapshot = scan(MARKER)
    assert set(pids(snapshot.tree(one.root, uid=os.getuid()))) == {one.child, one.orphan}
    marked = snapshot.tree(one.root, LEASE_1, uid=os.getuid())
    assert set(pids(marked)) == {one.child, one.in_new_session, one.orphan}
    assert snapshot.tree(one.root, LEASE_1) == []


@pytest.mark.promise("race-pids")
def test_a_reused_pid_brings_in_nothing(family: Callable[..., Family]) -> None:
    one = family()
    earlier = ProcessIdentity(one.root.boot_id, one.root.pid, one.root.start_time - 1)
    other_boot = ProcessIdentity("another-boot", one.root.pid, one.root.start_time)
    assert scan().tree(earlier) == []
    assert scan().tree(other_boot) == []


def test_a_root_below_another_keeps_its_own_tree(family: Callable[..., Family]) -> None:
    one = family()
    inner = identify(one.in_new_session)
    snapshot = scan()
    assert inner in snapshot
    assert inner not in snapshot.tree(one.root, apart=[inner])
    assert snapshot.tree(inner, apart=[one.root, inner]) == [inner]


# ---- a made-up /proc -------------------------------------------------------------------------------------------------


def make_process(
    proc: Path, pid: int, ppid: int, *, session: int = 1, state: str = "S", environ: bytes = b"", flags: int = 0
) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    numbers = f"{ppid} {session} {session} 0 -1 {flags} 1 2 3 4 5 6 7 8 20 0 1 0 {pid * 10} 1000 50"
    (folder / "stat").write_text(f"{pid} (a (b) {state} {numbers}")
    (folder / "status").write_text(f"Name:\ta\nTgid:\t{pid}\nUid:\t1000\t1000\t1000\t1000\n")
    (folder / "environ").write_bytes(environ)


def pid_of(folder: int) -> str:
    return Path(f"/proc/self/fd/{folder}").readlink().name


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "sys/kernel/random"
    folder.mkdir(parents=True)
    (folder / "boot_id").write_text("boot\n")
    (tmp_path / "self").mkdir()
    return tmp_path


def before_each_file(monkeypatch: pytest.MonkeyPatch, happens: Callable[[int, str], object]) -> None:
    """Have this happen before a file of a process is opened: it gets the descriptor of the process's folder, and the file's name."""
    real = os.open

    def opened(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            happens(dir_fd, path)
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", opened)


def test_zombies_and_kernel_threads_are_left_out_and_pid_two_is_not_special(proc: Path) -> None:
    make_process(proc, 2, 1)
    make_process(proc, 10, 2)
    make_process(proc, 11, 10, state="Z")
    make_process(proc, 12, 10, flags=0x00200040)
    assert pids(scan(proc=proc).tree(ProcessIdentity("boot", 2, 20))) == [2, 10]


def test_an_unreadable_environment_carries_no_marker(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_process(proc, 10, 1, environ=f"{MARKER}=x\0".encode())
    make_process(proc, 11, 1, environ=f"{MARKER}=x\0".encode())

    def refuse(folder: int, name: str) -> None:
        if name == "environ" and pid_of(folder) == "11":
            raise PermissionError(13, "not yours")

    before_each_file(monkeypatch, refuse)
    assert pids(scan(MARKER, proc=proc).tree(ProcessIdentity("boot", 10, 100), "x")) == [10]


@pytest.mark.parametrize(
    ("environ", "marker"),
    [
        (f"{MARKER}=one\0HOME=/\0", "one"),
        (f"HOME=/\0{MARKER}=one", "one"),
        (f"{MARKER}=one\0{MARKER}=two\0", "one"),
        (f"X{MARKER}=no\0{MARKER}X=no\0{MARKER}=one\0", "one"),
        (f"{MARKER}=\0", ""),
        (f"X{MARKER}=no\0HOME={MARKER}=no\0{MARKER}\0", None),
        ("", None),
    ],
)
def test_the_marker_is_the_variable_of_just_that_name(proc: Path, environ: str, marker: str | None) -> None:
    make_process(proc, 10, 1, environ=environ.encode())
    assert list(scan(MARKER, proc=proc).marked()) == ([] if marker is None else [marker])


def test_a_forked_process_is_told_from_one_that_runs_another_program() -> None:
    script = """
import os, subprocess, sys
reading, writing = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        program = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=sys.stdin)
        os.write(writing, f"{os.getppid()} {os.getpid()} {program.pid}".encode())
    sys.stdin.read()
    os._exit(0)
print(os.read(reading, 100).decode(), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child, grandchild, program = (identify(int(pid)) for pid in process.stdout.readline().split())
    root = identify(process.pid)
    snapshot = scan()
    assert snapshot.forked_from(child) == [root]
    assert snapshot.forked_from(grandchild) == [child, root]
    assert snapshot.forked_from(program) == snapshot.forked_from(root) == []
    process.communicate()
    assert scan().forked_from(child) == [], "of a process that is gone nothing is known"
