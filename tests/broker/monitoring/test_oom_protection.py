"""The out-of-memory killer spares suspended kernels, and the user of the killed one learns why.

Processes, control groups and the killer are real; only the driver is simulated. The tests raise adjustments first, so that any user
may lower them again.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.monitoring import host_memory
from fractional_gpu.broker.monitoring.host_memory import OomProtection
from fractional_gpu.broker.monitoring.sampler import Sampler
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.broker.recovery.recovery import recover
from fractional_gpu.broker.supervision import survivors
from fractional_gpu.broker.supervision.survivors import OomKills
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import DeviceSeen, HostMemorySeen, PoolConfigured, Wanted
from fractional_gpu.core.model import DeviceSpec, LeaseState, LeaseView, PoolSpec
from fractional_gpu.gpu.interface import Monitor, ProcessState
from fractional_gpu.host import memory
from fractional_gpu.host.memory import Headroom, smallest_limit
from fractional_gpu.host.process import ProcessIdentity, identify
from fractional_gpu.ledger.ledger import Ledger
from tests.broker.driver import DEVICE, Driver, swaps_of
from tests.broker.live import BECOME_NOBODY, DEADLINE_S, attach_fields
from tests.broker.monitoring.test_sampler import LEASE, view_of
from tests.broker.recovery.test_recovery import record_of
from tests.support.control_group import JOIN, memory_group

pytestmark = pytest.mark.promise("out-of-memory")

RAISED = 600
LIMIT_MIB = 400
S, L = ProcessState, LeaseState

# Holds memory as a suspended kernel does, and reads it back page by page, so that the killer interrupts it.
KERNEL = """
import sys
held = []
for line in sys.stdin:
    word, _, number = line.partition(" ")
    if word == "hold":
        for _ in range(int(number)):
            held.append(b"state" * 209715)
    print("whole" if all(part == b"state" * 209715 for part in held) else "damaged", flush=True)
"""


class Process:
    """A process with a lease's id in its environment, in a group, with a raised adjustment."""

    def __init__(self, lease_id: str, group: Path | None = None) -> None:
        join = "" if group is None else JOIN.format(group=str(group))
        raised = f"open('/proc/self/oom_score_adj', 'w').write('{RAISED}')"
        self.popen = subprocess.Popen(
            [sys.executable, "-S", "-c", f"{join}\n{raised}\n{KERNEL}"],
            env={"JUPYTER_GPU_LEASE": lease_id},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lease_id = lease_id
        assert self.ask("look") == "whole"
        self.identity = identify(self.popen.pid)

    def ask(self, line: str) -> str:
        """Send a line and return the answer; "" if the process ended instead."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()
        return self.popen.stdout.readline().strip()

    @property
    def adjustment(self) -> int:
        return memory.adjustment(self.popen.pid)

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@contextmanager
def process(lease_id: str = LEASE, group: Path | None = None) -> Iterator[Process]:
    made = Process(lease_id, group)
    try:
        yield made
    finally:
        made.end()


# -- the adjustment of one process -------------------------------------------------------------------------------------------


def test_an_adjustment_is_lowered_and_put_back() -> None:
    with process() as one:
        assert memory.lower(one.identity, 250) == one.adjustment == 250
        assert memory.lower(one.identity, 400) == 250, "it is never raised"
        memory.put_back(one.identity, RAISED)
        assert one.adjustment == RAISED
        memory.put_back(one.identity, 100)
        assert one.adjustment == RAISED, "nor lowered"


@pytest.mark.parametrize("floor", [-1000, -321, 0, 17, RAISED])
def test_it_is_lowered_as_far_as_is_permitted(monkeypatch: pytest.MonkeyPatch, floor: int) -> None:
    tried: list[int] = []

    def permitted(_file: int, value: int) -> bool:
        tried.append(value)
        return value >= floor

    monkeypatch.setattr(memory, "_permitted", permitted)
    with process() as one:
        assert memory.lower(one.identity, -400) == max(-400, floor)
    assert len(tried) < 15
    assert all(value < RAISED for value in tried)


def test_another_process_that_has_the_pid_by_now_is_left_alone() -> None:
    with process() as one:
        other = replace(one.identity, start_time=one.identity.start_time - 1)
        for change in (memory.lower, memory.put_back):
            with pytest.raises(ProcessLookupError):
                change(other, 0)
        assert one.adjustment == RAISED
    with pytest.raises(ProcessLookupError):
        memory.lower(one.identity, 0)


def test_the_smallest_group_is_what_is_full_first() -> None:
    with memory_group(LIMIT_MIB) as group, process(group=group) as one:
        limit = smallest_limit(one.popen.pid)
        assert limit.mib == LIMIT_MIB
        assert str(group) in limit.limited_by
        assert memory.kill_counter(one.popen.pid).parent == group
        assert memory.kill_count(memory.kill_counter(one.popen.pid)) == 0


def test_the_system_s_log_names_what_was_killed() -> None:
    with memory_group(LIMIT_MIB) as group, process(group=group) as one, process(group=group) as other:
        assert memory.was_killed(one.identity) in (False, None)
        one.ask(f"hold {2 * LIMIT_MIB}")
        one.popen.wait(DEADLINE_S)
        assert memory.was_killed(one.identity) in (True, None)
        assert memory.was_killed(other.identity) in (False, None)
        earlier = replace(one.identity, start_time=one.identity.start_time + 10**9)
        assert memory.was_killed(earlier) in (False, None), "the log is about another process that had the pid"


# -- leases ------------------------------------------------------------------------------------------------------------------


class Leases:
    """Replaces the broker: one lease, in the state that the test sets."""

    def __init__(self, identity: ProcessIdentity, uid: int = 1000) -> None:
        self.kernel = Kernel(lease_id=LEASE, uid=uid, token_sha256="", identity=identity)
        self.changes = 0
        self.anything_changed = asyncio.Event()
        self.view: LeaseView = view_of(L.RESIDENT)

    def views(self) -> list[tuple[Kernel, LeaseView]]:
        return [(self.kernel, self.view)]

    def becomes(self, state: LeaseState, *, saved_mib: int = 0, used_mib: int = 0) -> None:
        self.view = replace(view_of(state), saved_mib=saved_mib, used_mib=used_mib)
        self.changes += 1
        self.anything_changed.set()
        self.anything_changed = asyncio.Event()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "smallest_limit", lambda _pid: Headroom(LIMIT_MIB, "the test's group"))


def protection_of(leases: Leases, tmp_path: Path) -> OomProtection:
    return OomProtection(cast("Broker", leases), tmp_path / "ledger.oom.json")


@pytest.mark.usefixtures("limit")
async def test_a_killed_broker_leaves_it_to_the_next_to_put_it_back(tmp_path: Path) -> None:
    with process() as one:
        leases = Leases(one.identity)
        leases.becomes(L.SUSPENDED, saved_mib=100)
        await protection_of(leases, tmp_path).apply()
        assert one.adjustment == RAISED - 250
        leases.becomes(L.RESIDENT)
        task = asyncio.create_task(protection_of(leases, tmp_path).run())
        async with asyncio.timeout(DEADLINE_S):
            while one.adjustment != RAISED:  # noqa: ASYNC110 - the system says nothing of it
                await asyncio.sleep(0)
        leases.becomes(L.SUSPENDED, saved_mib=100)
        async with asyncio.timeout(DEADLINE_S):
            while one.adjustment == RAISED:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert one.adjustment == RAISED - 250, "kernels outlive the broker"


@pytest.mark.usefixtures("limit")
async def test_nothing_is_changed_that_could_not_be_written_down(tmp_path: Path) -> None:
    with process() as one:
        leases = Leases(one.identity)
        leases.becomes(L.SUSPENDED, saved_mib=100)
        record = tmp_path / "there" / "ledger.oom.json"
        protection = OomProtection(cast("Broker", leases), record)
        await protection.apply()
        assert one.adjustment == RAISED
        record.parent.mkdir()
        await protection.apply()
        assert one.adjustment == RAISED - 250, "it is tried again"


# -- a full group ------------------------------------------------------------------------------------------------------------

SAVED_MIB = {"first": 200, "second": 60}


@asynccontextmanager
async def broker_of(tmp_path: Path, driver: Driver, *processes: Process) -> AsyncIterator[Broker]:
    """Return a broker that finds these leases: those with saved state are suspended, the others are on the device."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    for one in processes:
        saved_mib = SAVED_MIB.get(one.lease_id, 0)
        record = record_of(
            attach_fields(one.popen.pid),
            L.SUSPENDED if saved_mib else L.RESIDENT,
            saved_mib=saved_mib,
            home_ids=(DEVICE,),
        )
        ledger.save_lease(replace(record, spec=replace(record.spec, lease_id=one.lease_id, reserve_mib=200)))
    swaps = swaps_of(driver)
    broker = Broker(Arbiter(), cast("Monitor", driver), swaps, LedgerWriter(ledger))
    broker.dispatch(DeviceSeen(at_ms=now_ms(), device=DeviceSpec(device_id=DEVICE, name="G", memory_mib=1000)))
    broker.dispatch(PoolConfigured(at_ms=now_ms(), pool=PoolSpec(name="default", devices=(DEVICE,))))
    broker.dispatch(HostMemorySeen(at_ms=now_ms(), budget_mib=4096))
    try:
        await recover(broker, swaps, ledger)
        yield broker
    finally:
        await broker.close()


async def until(broker: Broker, lease_id: str, state: LeaseState) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (view := broker.arbiter.lease(lease_id)) is None or view.state is not state:
            await broker.anything_changed.wait()


@pytest.mark.parametrize("protected", [True, False])
async def test_in_a_full_group_the_one_that_filled_it_is_taken_and_told_why(tmp_path: Path, *, protected: bool) -> None:
    """Without protection the killer takes the first one, which is the biggest: here the protected lease needs its protection."""
    driver = Driver()
    with memory_group(LIMIT_MIB) as group, ExitStack() as stack:
        first, second, neighbour = (
            stack.enter_context(process(name, group)) for name in ("first", "second", "neighbour")
        )
        for one in (first, second):
            driver.has_context(one.popen.pid, S.CHECKPOINTED, SAVED_MIB[one.lease_id])
            assert one.ask(f"hold {SAVED_MIB[one.lease_id]}") == "whole"
        driver.has_context(neighbour.popen.pid, S.RUNNING, 100)
        async with broker_of(tmp_path, driver, first, second, neighbour) as broker:
            sampler = Sampler(broker, {DEVICE: DeviceSpec(device_id=DEVICE, name="G", memory_mib=1000)}, lambda _: 4096)
            await sampler.sample()
            protection = OomProtection(broker, tmp_path / "ledger.oom.json")
            if protected:
                await protection.apply()
            await asyncio.to_thread(neighbour.ask, f"hold {LIMIT_MIB - sum(SAVED_MIB.values())}")
            taken, others = (neighbour, [first, second]) if protected else (first, [second, neighbour])
            driver.process_ended(taken.popen.pid)
            await until(broker, taken.lease_id, L.UNATTACHED)
            assert taken.popen.wait(DEADLINE_S) == -9
            (notice,) = broker.kernels[taken.lease_id].notices
            assert "out-of-memory killer ended this kernel" in notice
            assert f"control group {group} ({LIMIT_MIB} MiB)" in notice
            assert ("200 MiB that were saved from the GPU" in notice) is not protected
            for one in others:
                assert one.popen.poll() is None
                assert one.ask("look") == "whole"
                assert broker.kernels[one.lease_id].notices == []
                if one.lease_id in SAVED_MIB:
                    broker.dispatch(Wanted(at_ms=now_ms(), lease_id=one.lease_id))
                    await until(broker, one.lease_id, L.RESIDENT)
                    assert driver.states[one.popen.pid] is S.RUNNING
                    assert one.ask("look") == "whole"
            await protection.apply()
            assert {one.adjustment for one in others} == {RAISED}
            await broker.writer.flushed()
            lines = broker.writer.ledger.story(taken.lease_id)
            assert [line for line in lines if notice in str(line)], "its story has it, too"


async def test_who_ends_by_itself_is_not_said_to_have_been_killed(tmp_path: Path) -> None:
    driver = Driver()
    with memory_group(LIMIT_MIB) as group, process("first", group) as victim, process("neighbour", group) as one:
        driver.has_context(one.popen.pid, S.RUNNING, 100)
        async with broker_of(tmp_path, driver, one) as broker:
            sampler = Sampler(broker, {DEVICE: DeviceSpec(device_id=DEVICE, name="G", memory_mib=1000)}, lambda _: 4096)
            await asyncio.to_thread(victim.ask, f"hold {LIMIT_MIB}")  # without a lease, and before the broker looked
            assert victim.popen.wait(DEADLINE_S) == -9
            await sampler.sample()
            one.end()
            driver.process_ended(one.popen.pid)
            await until(broker, "neighbour", L.UNATTACHED)
            assert broker.kernels["neighbour"].notices == []


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OomKills:
    """Two kernels in a group that has lost no process yet."""
    file = tmp_path / "memory.events"
    file.write_text("oom 3\noom_kill 0\n")
    monkeypatch.setattr(survivors, "kill_counter", lambda _pid: file)
    monkeypatch.setattr(survivors, "smallest_limit", lambda _pid: Headroom(LIMIT_MIB, "the test's group"))
    monkeypatch.setattr(survivors, "was_killed", lambda _identity: None)
    made = OomKills()
    made.look({1, 2}, 0.0)
    return made


def kernel(pid: int) -> ProcessIdentity:
    return ProcessIdentity("boot", pid, 1)


def test_one_kill_accounts_for_one_kernel(kills: OomKills, tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("oom 4\noom_kill 1\n")
    assert kills.account_for(kernel(2)) == "the test's group"
    assert kills.account_for(kernel(1)) == ""
    assert kills.account_for(kernel(3)) == "", "it was never seen"


@pytest.mark.parametrize(("first", "niceness"), [("", -10), (BECOME_NOBODY, 0)], ids=["a service", "a user's own"])
def test_a_service_computes_before_users_programs_and_a_users_own_broker_as_they_do(first: str, niceness: int) -> None:
    program = (
        "from fractional_gpu.broker.monitoring.host_memory import protect_this_process\n"
        f"{first}\nprotect_this_process()\nimport os\nprint(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert ended.stdout == f"{niceness}\n"
