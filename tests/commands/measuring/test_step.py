"""What a step counts, and what ends it: tenants, other processes and the broker in virtual time."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.measuring import tenants as step_module
from fractional_gpu.commands.measuring.tenants import DisturbedError, Step, Tenant, TenantError
from fractional_gpu.commands.run.process import RunningCommand
from fractional_gpu.jupyter.kernel_lease import KernelLease
from fractional_gpu.protocol.accounts import Cost
from fractional_gpu.protocol.messages import OthersUse
from fractional_gpu.protocol.status import HostStatus, LeaseStatus, Neighbour
from tests.commands.pictures import a_device, a_host, a_lease

DEVICE = "gpu-0"
NEVER_S = 1e9
LIMIT_S = 30.0
FRESH_S = 0.25  # what a broker takes to sample its devices


@dataclass
class Program:
    """A tenant's program, by seconds since the step's start: its first use of the device, how long a unit takes then, and its end."""

    name: str
    begins_s: float = 0.1
    unit_s: Callable[[float], float] = lambda _: 0.1
    ends_s: float = NEVER_S
    status: int = 0
    went_s: float | None = None
    reported_s: float | None = None


@dataclass
class Place:
    """The device, its programs and other users' activity. It is also the step's clock and broker."""

    folder: Path
    programs: Sequence[Program]
    others_milli: Callable[[float], int | None] = lambda _: 0
    strangers_mib: Callable[[float], int] = lambda _: 0
    neighbours: int = 0
    now_s: float = 100.0
    others_asked_ms: list[int] = field(default_factory=list)

    # -- the clock

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for program in self.programs:
            self._report(program)

    def _report(self, program: Program) -> None:
        if program.went_s is None:
            return
        with (self.folder / program.name / "ticks").open("a") as file:
            while True:
                last_s = program.reported_s
                next_s = program.begins_s if last_s is None else last_s + program.unit_s(last_s)
                if program.went_s + next_s > self.now_s or next_s > program.ends_s:
                    return
                file.write(f"{round((program.went_s + next_s) * 1e9)} 1\n")
                program.reported_s = next_s

    # -- the broker

    def status(self, *, fresh: bool = False) -> HostStatus:
        if fresh:
            self.sleep(FRESH_S)
        device = a_device(
            device_id=DEVICE,
            memory_mib=1000,
            reserved_mib=100 * len(self.programs),
            stranger_mib=self.strangers_mib(self.since(self.programs[0])),
        )
        return a_host(devices=[device], leases=[self._lease(one) for one in self.programs])

    def _lease(self, program: Program) -> LeaseStatus:
        since_s = self.since(program)
        uses = program.begins_s <= since_s
        state = "unattached" if since_s >= program.ends_s else "resident"
        return a_lease(
            lease_id=program.name, device_id=DEVICE, reserved_mib=100, used_mib=16 * uses, state=state, busy=True
        )

    def since(self, program: Program) -> float:
        return -1.0 if program.went_s is None else self.now_s - program.went_s

    def others(self, lease_id: str, last_ms: int, without: Sequence[str] = ()) -> OthersUse:
        assert [lease_id, *without] == [one.name for one in self.programs]
        self.others_asked_ms.append(last_ms)
        return OthersUse(used_milli=self.others_milli(self.since(self.programs[0])))

    def lease(self, lease_id: str) -> LeaseStatus:
        assert lease_id == self.programs[0].name
        busy = len(self.programs) - 1 + self.neighbours
        return a_lease(neighbours=[Neighbour(fraction_milli=1, reserved_mib=1, state="resident", busy=True)] * busy)


@dataclass
class Running:
    """A running program's process."""

    place: Place
    program: Program

    def has_ended(self) -> bool:
        return self.place.since(self.program) >= self.program.ends_s

    def end(self, patience_s: float) -> int:
        del patience_s
        return self.program.status if self.has_ended() else 128 + signal.SIGTERM


@dataclass(eq=False)
class Placed(Tenant):
    """A tenant whose process is the program."""

    place_of_all: Place | None = None
    program: Program | None = None

    def go(self) -> None:
        assert self.place_of_all is not None
        assert self.program is not None
        self.program.went_s = self.place_of_all.now_s
        self.running = cast("RunningCommand", Running(self.place_of_all, self.program))

    def cost(self) -> Cost:
        return cast("Cost", a_cost())


@dataclass
class a_cost:  # noqa: N801 - as its neighbours in `pictures`
    now_milli: int = 0
    currency: str = ""


Make = Callable[..., tuple[Step, Place]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def made(*programs: Program, measured: int | None = None, **others: Any) -> tuple[Step, Place]:  # noqa: ANN401 - Place's
        place = Place(tmp_path, programs, **others)
        monkeypatch.setattr(step_module, "time", place)
        tenants = []
        for one in programs:
            folder = tmp_path / one.name
            folder.mkdir()
            (folder / "ticks").touch()
            (folder / "output").write_text("it said so\n")
            lease = KernelLease(
                lease_id=one.name,
                token="",
                token_file=folder / "token",
                socket="",
                reserve_mib=100,
                gated=False,
                environment={},
            )
            tenants.append(Placed([one.name], lease, folder, device_id=DEVICE, place_of_all=place, program=one))
        return Step(
            cast("BrokerClient", place), "default", tenants, measured or len(programs), place.now_s + LIMIT_S
        ), place

    return made


def test_steady_tenants_are_measured_while_all_of_them_work(make: Make) -> None:
    step, place = make(Program("one"), Program("other", begins_s=4.0))
    sample = step.run()
    assert sample.typical_s == pytest.approx(0.1)
    assert place.since(place.programs[0]) >= 5
    assert len(sample.latencies_s) < 50, "what the first one did alone does not count"


@pytest.mark.parametrize("ends_s", [0.51, 0.61, 0.71, 0.81, 0.91, 1.01, 1.11])
def test_a_program_that_fails_is_told_and_not_taken_for_a_disturbance(make: Make, ends_s: float) -> None:
    step, _ = make(Program("good"), Program("bad", ends_s=ends_s, status=3))
    with pytest.raises(TenantError, match=r'exit status 3; its last output: "it said so"'):
        step.run()


def test_beside_others_who_work_all_the_time_nothing_is_begun(make: Make) -> None:
    step, place = make(Program("one"), others_milli=lambda _: 400)
    with pytest.raises(
        DisturbedError, match="another user's kernel, or a process without a lease, worked on the device"
    ):
        step.run()
    assert place.programs[0].went_s is None


def test_others_who_begin_to_work_end_the_step_though_their_memory_was_there_before(make: Make) -> None:
    step, place = make(Program("one"), strangers_mib=lambda _: 200, others_milli=lambda at_s: 400 if at_s > 0.7 else 0)
    with pytest.raises(DisturbedError):
        step.run()
    assert place.since(place.programs[0]) < 2
    assert min(place.others_asked_ms) >= 1000, "the device's figures are no finer"


def test_memory_that_comes_or_goes_ends_the_step(make: Make) -> None:
    step, _ = make(Program("one"), strangers_mib=lambda at_s: 300 if at_s > 0.7 else 0)
    with pytest.raises(DisturbedError, match="memory use by others on the device changed"):
        step.run()


def test_where_the_device_does_not_count_the_leases_cells_do_and_the_sample_says_so(make: Make) -> None:
    step, _ = make(Program("one"), Program("other"), others_milli=lambda _: None, strangers_mib=lambda _: 300)
    assert step.run().is_company_unknown
