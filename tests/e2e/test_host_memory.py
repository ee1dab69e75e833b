"""Saved state uses host memory: if a kernel's control group or the machine runs short of it, a real broker acts.

The broker reads its machine's memory from a folder that looks like /proc, so that the test sets how much is left. Everything else
is real.
"""

from pathlib import Path

import pytest

from fractional_gpu.protocol.errors import ConflictError
from fractional_gpu.protocol.status import LeaseStatus
from tests.support.world import Server, World, until

MIB = 1024**2
LIMIT_MIB = 4096
HOLD = "from fractional_gpu.gpu.simulated import cuda; buffer = cuda.allocate(64 << 20); buffer.write(b'abc')"
CHECK = "print(buffer.read(3))"
CONFIG = """\
from pathlib import Path
from fractional_gpu.host import memory
for reads in (memory.system_headroom, memory.shortage, memory.LimitReader.__init__):
    reads.__kwdefaults__["proc"] = Path({proc!r})
c.GPUBroker.pools = {{"default": {{"preempt": "priorities", "idle_after": "on-demand", "min_residency": "0s", "retry_refused": "0s"}}}}
"""


class Machine:
    def __init__(self, world: World) -> None:
        self._proc, self._group = world.folder / "proc", world.folder / "group"
        (self._proc / "self").mkdir(parents=True)
        self._group.mkdir()
        mount = f"30 23 0:26 / {self._group} rw,nosuid - cgroup2 cgroup2 rw\n"
        (self._proc / "self" / "mountinfo").write_text(mount)
        (self._group / "memory.max").write_text(f"{LIMIT_MIB * MIB}\n")
        self.leave(group_mib=LIMIT_MIB, system_mib=32 * 1024)
        world.configure(CONFIG.format(proc=str(self._proc)))

    def shows(self, pid: int) -> None:
        (self._proc / str(pid)).mkdir()
        _write(self._proc / str(pid) / "cgroup", "0::/\n")

    def leave(self, *, group_mib: int = LIMIT_MIB, system_mib: int = 32 * 1024) -> None:
        _write(self._proc / "meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {system_mib << 10} kB\n")
        _write(self._group / "memory.current", f"{(LIMIT_MIB - group_mib) * MIB}\n")


def _write(file: Path, text: str) -> None:
    """Write in one step, so that a reader sees the whole file, as with the real ones."""
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(text)
    beside.replace(file)


def test_state_is_not_saved_where_there_is_no_room_and_comes_back_early_from_where_it_gets_short(
    world: World, server: Server
) -> None:
    machine = Machine(world)
    (name,) = world.install(500)
    notebook = server.start(name)
    notebook.must(HOLD)
    lease = world.lease(notebook.kernel_id)
    assert lease.pid is not None
    machine.shows(lease.pid)

    def suspend() -> LeaseStatus:
        with world.client() as client:
            return client.suspend(lease.lease_id)

    def comes_back(resumes: int) -> list[str]:
        until(lambda: world.lease(notebook.kernel_id).resumes == resumes, "it came back without being asked for")
        until(lambda: world.lease(notebook.kernel_id).state == "resident", "it is on the device")
        with world.client() as client:
            return [line.sentence for line in client.story(lease.lease_id).lines]

    machine.leave(group_mib=0)
    with pytest.raises(
        ConflictError, match=r"saved in host memory, but only 0 .*limited by the memory limit of control"
    ):
        suspend()
    assert notebook.must(CHECK).text == "b'abc'\n"

    machine.leave()
    assert suspend().state == "suspended"
    machine.leave(group_mib=0)
    said = comes_back(1)
    assert any("host memory is short where its state is saved and a device has room" in line for line in said), said

    machine.leave()
    assert notebook.must(CHECK).text == "b'abc'\n"
    assert suspend().state == "suspended"
    machine.leave(system_mib=0)
    said = comes_back(2)
    assert any("host memory is short by" in line for line in said), said
    assert notebook.must(CHECK).text == "b'abc'\n"
