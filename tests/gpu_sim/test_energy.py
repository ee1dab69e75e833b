"""What a simulated device draws is what its work is worth, exactly, whatever becomes of the processes."""

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fractional_gpu.gpu.simulated import energy, faults, host
from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer
from fractional_gpu.gpu.simulated.host import SimulatedHost
from fractional_gpu.gpu.simulated.load import Piece
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.gpu.simulated.processes import find_process, forget, reap
from fractional_gpu.gpu.simulated.store import SimulatedHostError, Store
from tests.gpu_sim.kernels import Kernel, eventually, in_flight
from tests.gpu_sim.machine import MS, SECOND, Machine, virtual

IDLE_MW, PEAK_MW = 75_000, 700_000
RANGE_W = 625
PROMISE_MS = energy.PROMISE_NS // MS


def about(energy_mj: float) -> object:
    """Equal to this energy, up to rounding."""
    return pytest.approx(energy_mj, abs=2)


def test_a_device_at_rest_draws_its_idle_power(machine: Machine) -> None:
    assert machine.counter() == 0
    machine.passes(10_000)
    assert (machine.sensors().power_mw, machine.counter()) == (IDLE_MW, 750_000)


def test_work_draws_by_how_much_it_uses(simulated: SimulatedHost, machine: Machine) -> None:
    machine.works("a", 400)
    machine.works("b", 600)
    machine.works("c", 100, device=1)
    machine.passes(2000)
    assert machine.sensors().power_mw == PEAK_MW
    assert machine.counter() == 2 * PEAK_MW
    assert machine.sensors(1).power_mw == IDLE_MW + 62_500
    assert [simulated.energy_of(lease=lease) for lease in "abc"] == [500_000, 750_000, 125_000]
    assert simulated.energy_of(device_id=machine.devices[0]) == 1_250_000
    assert simulated.energy_of() == 1_375_000


def test_a_device_never_draws_more_than_its_peak_however_much_is_asked_of_it(machine: Machine) -> None:
    for key in "abcd":
        machine.works(key, 900)
    machine.passes(1000)  # each sees the others after a step
    before_mj = machine.counter()
    machine.passes(10_000)
    assert machine.counter() - before_mj == pytest.approx(10 * PEAK_MW, rel=1e-3)
    assert machine.sensors().power_mw == pytest.approx(PEAK_MW, rel=5e-3)


@pytest.mark.parametrize(("seconds", "milli"), [(0.3, 800), (0.001, 1000), (0.0123, 37)])
def test_a_piece_of_work_has_its_price_to_the_millijoule(
    simulated: SimulatedHost, machine: Machine, seconds: float, milli: int
) -> None:
    load = machine.process("a")
    for _ in range(100):
        piece = load.begin(seconds, milli, machine.devices[0])
        machine.passes(400, step_ms=40)
        load.end(piece)
    machine.passes(60_000)  # longer than what the ring of totals goes back
    price_mj = 100 * seconds * milli * RANGE_W
    assert simulated.energy_of(lease="a") == about(price_mj)
    assert machine.counter() == about(IDLE_MW * 100 + price_mj)


@pytest.mark.parametrize("noticed_ms", [0, 50, 10_000])
def test_what_a_killed_process_drew_does_not_depend_on_when_its_death_is_noticed(
    simulated: SimulatedHost, machine: Machine, noticed_ms: int
) -> None:
    machine.works("a", 1000)
    machine.passes(1000)
    machine.kill("a")
    machine.passes(noticed_ms)
    before_mj = machine.counter()
    reap(machine.store)
    assert machine.counter() >= before_mj
    machine.passes(10_000 - noticed_ms)
    assert simulated.energy_of(lease="a") == about((1000 + PROMISE_MS) * RANGE_W)
    assert machine.counter() == about(11 * IDLE_MW + (1000 + PROMISE_MS) * RANGE_W)


def test_a_process_that_was_stopped_makes_up_for_it_when_it_goes_on(simulated: SimulatedHost, machine: Machine) -> None:
    machine.works("a", 1000)
    machine.passes(1000)
    machine.now_ns += 5 * SECOND
    assert simulated.energy_of() == about((1000 + PROMISE_MS) * RANGE_W)
    machine.passes(50)
    assert simulated.energy_of() == 6050 * RANGE_W


def test_each_device_counts_what_was_done_on_it(simulated: SimulatedHost, machine: Machine) -> None:
    load = machine.process("a")
    for device, ms in ((0, 1000), (1, 300), (0, 200)):
        machine.move("a", device)
        piece = load.begin(600, 1000, machine.devices[device])
        machine.passes(ms)
        load.end(piece)
    machine.end("a")
    first, second = machine.devices
    assert simulated.energy_of(lease="a", device_id=first) == 1200 * RANGE_W
    assert simulated.energy_of(lease="a", device_id=second) == 300 * RANGE_W
    assert machine.counter(0) == 1500 * IDLE_MW // 1000 + 1200 * RANGE_W
    assert machine.counter(1) == 1500 * IDLE_MW // 1000 + 300 * RANGE_W


def test_a_second_context_of_a_process_goes_on_from_the_first_one(simulated: SimulatedHost, machine: Machine) -> None:
    for _ in range(3):
        machine.works("a", 1000)
        machine.passes(500)
        machine.end("a")
    assert simulated.energy_of(lease="a") == 1500 * RANGE_W
    assert machine.counter() == 1500 * IDLE_MW // 1000 + 1500 * RANGE_W


def test_work_of_another_thread_at_the_end_counts_until_then(simulated: SimulatedHost, machine: Machine) -> None:
    piece = machine.works("a", 1000)
    machine.passes(130, step_ms=10)
    load = machine.loads["a"]
    machine.end("a")
    machine.passes(1000)
    load.end(piece)
    assert simulated.energy_of(lease="a") == 130 * RANGE_W


def test_what_is_booked_twice_counts_once(machine: Machine) -> None:
    """As after a reader that was killed between booking a dead process and removing its folder."""
    machine.works("a", 1000)
    machine.passes(1000)
    machine.kill("a")
    machine.passes(1000)
    before_mj = machine.counter()
    for _ in range(2):
        with machine.store.transaction() as db:
            energy.book(db, machine.store.memory, ["a"])
    assert machine.counter() == before_mj
    reap(machine.store)
    assert machine.counter() == before_mj


def test_only_the_last_ended_processes_are_remembered_and_the_device_forgets_nothing(
    simulated: SimulatedHost, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "_REMEMBERED", 3)
    machine.works("stays", 100)
    for number in range(6):
        machine.works(f"p{number}", 500)
        machine.passes(100)
        machine.end(f"p{number}")
    assert sorted(one.lease for one in simulated.work()) == ["p3", "p4", "p5", "stays"]
    assert machine.counter() == 600 * IDLE_MW // 1000 + 600 * RANGE_W * 6 // 10


def test_a_process_that_ends_while_it_is_read_counts_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.works("a", 1000)
    machine.passes(1000)
    _meanwhile(monkeypatch, lambda: machine.end("a"))
    assert machine.counter() == PEAK_MW


def test_a_process_that_moves_while_it_is_read_counts_on_the_device_where_it_worked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = machine.works("a", 1000)
    machine.passes(1000)
    load = machine.loads["a"]

    def goes_on_elsewhere() -> None:
        load.end(piece)
        machine.move("a", 1)
        again = load.begin(600, 1000, machine.devices[1])
        machine.passes(500)
        load.end(again)

    _meanwhile(monkeypatch, goes_on_elsewhere)
    assert machine.counter() - PEAK_MW in range(IDLE_MW // 2 + 1), "the time of a reading is when it began"
    assert machine.counter(1) == 3 * IDLE_MW // 2 + 500 * RANGE_W


def _meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Let something happen between the two things that a reader reads: the books, and what a process says."""
    real = energy.read_used

    def read_used(folder: str) -> energy.Used | None:
        monkeypatch.setattr(energy, "read_used", real)
        happens()
        return real(folder)

    monkeypatch.setattr(energy, "read_used", read_used)


KINDS = ("work", "work", "pass", "pass", "sleep", "finish", "move", "end", "kill", "notice")
ACTIONS = st.tuples(st.sampled_from(KINDS), st.integers(0, 1), st.integers(1, 1000), st.integers(1, 400))


class Life:
    """What happens to two processes, and what their work is worth."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pieces: dict[str, list[Piece]] = {}
        self.begun: list[tuple[Piece, int, str]] = []  # every piece, how long it takes alone, and its device
        self.kills = 0

    def act(self, kind: str, number: int, size: int, ms: int) -> None:
        key = f"p{number}"
        if kind == "pass":
            step_ms = 1 + size % 50
            self.machine.passes(ms // step_ms * step_ms, step_ms=step_ms)
        elif kind == "sleep":  # no process says anything meanwhile
            self.machine.now_ns += ms * MS
        elif kind == "notice":
            known = [row[0] for row in self.machine.store.query("SELECT key FROM processes")]
            forget(self.machine.store, [one for one in known if one not in self.machine.loads])
        elif kind == "work":
            self.work(key, number, size, ms)
        elif key in self.machine.loads:
            self.change(kind, key)

    def work(self, key: str, number: int, milli: int, ms: int) -> None:
        if key not in self.machine.loads:
            if find_process(self.machine.store, key) is not None:
                return  # it was killed, and that was not noticed yet
            self.machine.process(key, number % 2)
        process = find_process(self.machine.store, key)
        assert process is not None
        piece = self.machine.loads[key].begin(ms / 1000, milli, process.device)
        self.pieces.setdefault(key, []).append(piece)
        self.begun.append((piece, ms * MS, process.device))

    def change(self, kind: str, key: str) -> None:
        pieces = self.pieces.pop(key, [])
        if kind == "kill":
            self.machine.kill(key)
            self.kills += 1
        elif kind == "end":
            self.machine.end(key)
        else:
            for piece in pieces:
                self.machine.loads[key].end(piece)
            if kind == "move":
                process = find_process(self.machine.store, key)
                assert process is not None
                self.machine.move(key, 1 - self.machine.devices.index(process.device))

    def worth_mj(self, device_id: str) -> float:
        """What was done on a device, by what is left of each piece of work."""
        done_ns = [(ns - (piece.left_ns or 0)) * piece.milli for piece, ns, on in self.begun if on == device_id]
        return sum(done_ns) / 1000 / MS * RANGE_W


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_the_counter_never_goes_back_and_is_at_the_end_what_all_work_was_worth(
    actions: list[tuple[str, int, int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        simulated = host.create(Path(folder) / "host", "2x256MiB")
        with virtual(simulated.directory) as machine:
            life, begun_ns, said = Life(machine), machine.now_ns, [0, 0]
            for action in [*actions, ("pass", 0, 0, 1)]:
                life.act(*action)
                now = [machine.counter(0), machine.counter(1)]
                assert all(after >= before - 1 for before, after in zip(said, now, strict=True)), "it went back"
                said = now
            idle_mj = IDLE_MW * (machine.now_ns - begun_ns) // SECOND
            for device_id, said_mj in zip(machine.devices, said, strict=True):
                assert said_mj == about(idle_mj + simulated.energy_of(device_id=device_id))
                worth_mj = idle_mj + life.worth_mj(device_id)
                assert worth_mj - 2 <= said_mj <= worth_mj + 2 + life.kills * PROMISE_MS * RANGE_W


# -- settings --------------------------------------------------------------------------------------------------------------


def test_what_was_drawn_stays_when_devices_draw_otherwise_from_now_on(machine: Machine) -> None:
    machine.works("a", 1000)
    machine.passes(1000)
    machine.store.configure(idle_mw=10_000, peak_mw=20_000)
    assert machine.counter() == about(PEAK_MW)
    machine.passes(1000)
    assert machine.counter() == about(PEAK_MW + 20_000)
    assert machine.sensors().power_mw == 20_000
    machine.store.configure(latency_ms=1)
    assert machine.counter() == about(PEAK_MW + 20_000)


@pytest.mark.parametrize(
    "wrong", [{"idle_mw": 700_001}, {"peak_mw": 74_999}, {"peak_mw": 10_000_001}, {"power_noise_milli": 1001}]
)
def test_a_draw_that_cannot_be_is_refused(simulated: SimulatedHost, wrong: dict[str, int]) -> None:
    with closing(Store(simulated.directory)) as store:
        with pytest.raises(SimulatedHostError, match="not allowed"):
            store.configure(**wrong)
        assert store.settings().draw == (IDLE_MW, PEAK_MW, 0)


def test_noise_is_the_same_for_all_readers_and_adds_up_to_nothing(machine: Machine) -> None:
    machine.passes(1350)
    machine.store.configure(power_noise_milli=200)
    assert machine.counter() == 1350 * IDLE_MW // 1000
    machine.passes(650)
    seen, counted = set(), [machine.counter()]
    for _ in range(400):
        machine.passes(50)
        first, second = machine.sensors(), machine.sensors()
        assert first == second
        assert first.power_mw is not None
        seen.add(first.power_mw)
        counted.append(machine.counter())
    assert counted == sorted(counted)
    assert len(seen) > 10
    assert 0.8 * IDLE_MW <= min(seen) < IDLE_MW < max(seen) <= 1.2 * IDLE_MW
    half_s = [after - before for before, after in zip(counted[:-10:10], counted[10::10], strict=True)]
    assert min(half_s) < 0.95 * IDLE_MW / 2 < 1.05 * IDLE_MW / 2 < max(half_s), "the counter has it"
    assert counted[-1] - counted[0] == about(20 * IDLE_MW), "ten whole pairs of seconds"
    machine.store.configure(power_noise_milli=0)
    assert machine.counter() == about(counted[-1])


# -- hosts -----------------------------------------------------------------------------------------------------------------


def test_the_counter_goes_on_when_a_broker_opens_the_host_again(simulated: SimulatedHost, machine: Machine) -> None:
    machine.works("a", 1000)
    machine.passes(1000)
    machine.end("a")
    host.create(simulated.directory, "2x256MiB")
    assert machine.counter() == PEAK_MW
    changed = host.create(simulated.directory, "1x128MiB")
    assert changed.work() == []
    machine.devices = [changed.devices[0].device_id]
    assert machine.counter() == 0


def test_a_host_of_another_version_is_left_as_it_is(simulated: SimulatedHost) -> None:
    with closing(Store(simulated.directory)) as store:
        with store.transaction() as db:
            db.execute("UPDATE meta SET value='99' WHERE name='version'")
        with pytest.raises(SimulatedHostError, match="version 99"):
            host.open_host(simulated.directory)


def test_a_process_whose_record_of_its_work_is_gone_draws_nothing_that_is_known(
    simulated: SimulatedHost, machine: Machine
) -> None:
    machine.works("a", 1000)
    (machine.store.process_folder("a") / "used").unlink()
    machine.passes(1000)
    assert machine.counter() == IDLE_MW
    machine.end("a")
    assert simulated.energy_of() == 0


def test_a_boot_of_the_machine_begins_the_counter_anew(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.works("a", 1000)
    machine.passes(1000)
    machine.kill("a")
    monkeypatch.setattr(energy, "boot", lambda: "another1")
    machine.now_ns = 20 * SECOND
    assert machine.counter() == 20 * IDLE_MW
    machine.now_ns += SECOND
    assert machine.counter() == 21 * IDLE_MW
    machine.now_ns = 2000 * SECOND  # the killed process, which nothing hears any more, ends on its own clock


# -- sensors that fail -----------------------------------------------------------------------------------------------------


def test_a_counter_that_is_set_goes_on_from_there(simulated: SimulatedHost, machine: Machine) -> None:
    device = machine.devices[0]
    machine.passes(5000)
    with closing(SimulatedMonitor(simulated.directory)) as monitor:
        assert monitor.sensors(device).energy_mj == 5 * IDLE_MW
        for energy_mj in (0, 10**15, 7):
            host.set_counter(simulated.directory, device, energy_mj)
            assert monitor.sensors(device).energy_mj == energy_mj
            machine.passes(1000)
            assert monitor.sensors(device).energy_mj == energy_mj + IDLE_MW
    assert machine.counter(1) == 8 * IDLE_MW
    with pytest.raises(SimulatedHostError, match="0 or more"):
        host.set_counter(simulated.directory, device, -1)
    with pytest.raises(SimulatedHostError, match="no simulated device"):
        host.set_counter(simulated.directory, "SIM-none", 1)


def test_a_counter_may_say_something_absurd_once(simulated: SimulatedHost, machine: Machine) -> None:
    machine.passes(1000)
    faults.inject(simulated.directory, "sensors", "lie:123456789012345")
    assert [machine.counter() for _ in range(2)] == [123456789012345, IDLE_MW]


@pytest.mark.parametrize(("fault", "pid"), [("lie", None), ("lie:much", None), ("lie:-1", None), ("fail:unknown", 1)])
def test_a_fault_of_sensors_that_is_none_is_refused(simulated: SimulatedHost, fault: str, pid: int | None) -> None:
    with pytest.raises(SimulatedHostError):
        faults.inject(simulated.directory, "sensors", fault, pid=pid)
    assert faults.listed(simulated.directory) == []


# -- real processes --------------------------------------------------------------------------------------------------------


def test_what_a_process_drew_is_known_while_it_lives_and_after_it(simulated: SimulatedHost, kernel: Kernel) -> None:
    kernel.run("cuda.launch(0.2, 0.5)")
    assert simulated.energy_of(pid=kernel.pid) == about(0.1 * RANGE_W * 1000)
    kernel.run("cuda.reset()")
    kernel.run("cuda.launch(0.1, 1.0)")
    assert simulated.energy_of(pid=kernel.pid) == about(0.2 * RANGE_W * 1000)
    kernel.kill()
    host.create(simulated.directory, "2x256MiB")
    assert simulated.energy_of(pid=kernel.pid) == about(0.2 * RANGE_W * 1000)


def test_what_is_done_after_a_resume_elsewhere_counts_there(
    simulated: SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    first, second = (device.device_id for device in simulated.devices)
    kernel.run("cuda.launch(0.2)")
    for target in (second, first, first):
        driver.lock(kernel.pid, 1000)
        driver.checkpoint(kernel.pid)
        driver.restore(kernel.pid, {first: target, second: target})
        driver.unlock(kernel.pid)
        kernel.run("cuda.launch(0.1)")
    assert simulated.energy_of(pid=kernel.pid, device_id=first) == about(0.4 * RANGE_W * 1000)
    assert simulated.energy_of(pid=kernel.pid, device_id=second) == about(0.1 * RANGE_W * 1000)


def test_a_process_that_is_killed_in_the_middle_of_its_work_has_drawn_until_then(
    simulated: SimulatedHost, kernel: Kernel, monitor: SimulatedMonitor
) -> None:
    device = simulated.devices[0].device_id
    kernel.run("cuda.memory_info()")
    began_s = time.monotonic()
    kernel.begin("cuda.launch(600)")
    eventually(lambda: in_flight(simulated, kernel.pid) and simulated.energy_of() > 100_000, "it works")
    least_mj = simulated.energy_of()
    kernel.kill()
    most_mj = (time.monotonic() - began_s + PROMISE_MS / 1000) * RANGE_W * 1000
    before_mj = monitor.sensors(device).energy_mj
    monitor.use(device)
    after_mj = monitor.sensors(device).energy_mj
    assert before_mj is not None
    assert after_mj is not None
    assert after_mj >= before_mj
    assert least_mj <= simulated.energy_of(pid=kernel.pid) <= most_mj
    worth_mj = simulated.energy_of()
    monitor.use(device)
    assert simulated.energy_of() == worth_mj


def test_readers_beside_processes_that_come_and_go_never_see_the_counter_go_back(
    simulated: SimulatedHost, monitor: SimulatedMonitor
) -> None:
    device = simulated.devices[0].device_id
    said, ended = [0], threading.Event()

    def read() -> None:
        while not ended.is_set():
            said.append(monitor.sensors(device).energy_mj or 0)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with Kernel(simulated) as first, Kernel(simulated) as second:
            for number in range(20):
                first.run(f"cuda.launch(0.01, {0.3 + number / 40})")
                second.run("cuda.launch(0.002)")
                first.run("cuda.reset()")
                monitor.use(device)
    finally:
        ended.set()
        reader.join()
    assert said == sorted(said)
    assert simulated.energy_of() == about(sum(10 * (0.3 + number / 40) * RANGE_W + 2 * RANGE_W for number in range(20)))
