"""Work on a simulated device is counted, and slows other work down by the documented model."""

import pytest

from fractional_gpu.gpu.simulated.host import SimulatedHost
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from tests.gpu_sim.kernels import Kernel, KernelError, eventually
from tests.gpu_sim.machine import MS, Machine


def test_work_that_fits_on_the_device_together_is_not_slowed_down(machine: Machine) -> None:
    first, second = machine.works("a", 400), machine.works("b", 600)
    machine.passes(1000)
    assert (first.stretch_milli, second.stretch_milli) == (1000, 1000)
    assert (machine.used_milli("a", 1000), machine.used_milli("b", 1000)) == (400, 600)
    assert first.left_s == 599


def test_work_that_asks_for_more_than_the_device_takes_longer_by_the_model(machine: Machine) -> None:
    first, second = machine.works("a", 500), machine.works("b", 1000)
    machine.passes(50)  # the first one sees the second one
    assert (first.stretch_milli, second.stretch_milli) == (1310, 1619)  # 1 - u + u * k, and k is the golden ratio
    before_s = first.left_s, second.left_s
    machine.passes(1000)
    assert before_s[0] - first.left_s == pytest.approx(1.0)
    assert before_s[1] - second.left_s == pytest.approx(1.0)
    assert (machine.used_milli("a", 1000), machine.used_milli("b", 1000)) == (381, 617), "the whole device"


def test_work_on_another_device_slows_nothing_down(machine: Machine) -> None:
    first, second = machine.works("a", 1000), machine.works("b", 1000, device=1)
    machine.passes(50)
    assert (first.stretch_milli, second.stretch_milli) == (1000, 1000)


def test_work_that_has_ended_slows_nothing_down(machine: Machine) -> None:
    first, second = machine.works("a", 1000), machine.works("b", 1000, seconds=0.2)
    machine.passes(50)
    assert first.stretch_milli == 2000
    machine.passes(400)
    assert second.left_s == 0
    machine.passes(50)
    assert first.stretch_milli == 1000


def test_work_of_a_process_that_was_killed_is_over_when_it_would_have_ended(machine: Machine) -> None:
    first = machine.works("a", 1000)
    machine.works("b", 1000, seconds=0.2)
    killed = machine.loads.pop("b")
    machine.passes(100)
    assert first.stretch_milli == 2000
    machine.passes(400)
    assert first.stretch_milli == 1000
    assert machine.used_milli("b", 500) == 400, "slowed down, it took 0.4 s of the last 0.5 s for its 0.2 s"
    killed.close()


def test_threads_of_one_process_slow_each_other_down(machine: Machine) -> None:
    first = machine.works("a", 800)
    second = machine.loads["a"].begin(600, 700, machine.devices[0])
    assert (first.stretch_milli, second.stretch_milli) == (1532, 1466)
    other = machine.works("b", 500)
    machine.loads["a"].share_again(machine.devices[0])
    assert (first.stretch_milli, second.stretch_milli, other.stretch_milli) == (2179, 2032, 1737), (
        "each counts by itself"
    )


def test_of_very_many_pieces_the_last_ones_count_as_one(machine: Machine) -> None:
    load = machine.process("a")
    for _ in range(40):
        load.begin(600, 1000, machine.devices[0])
    other = machine.works("b", 1000)
    assert other.stretch_milli == 33_000, "32 pieces of the other process, and this one"


def test_what_was_used_is_known_of_any_part_of_the_last_seconds(machine: Machine) -> None:
    load = machine.process("a")
    for _ in range(20):  # 100 ms of work, 100 ms of pause
        piece = load.begin(0.1, 500, machine.devices[0])
        machine.passes(100)
        load.end(piece)
        machine.now_ns += 100 * MS
    assert machine.used_milli("a", 4000) == 250
    assert machine.used_milli("a", 2000) == 250
    assert machine.used_milli("a", 100) == 0
    assert machine.used_milli("a", 150) == 166, "50 ms of work in 150 ms"
    assert machine.used_milli("a", 40_000) == 25, "it did nothing before"


def test_of_a_time_that_is_forgotten_the_figure_is_of_the_time_since(machine: Machine) -> None:
    machine.works("a", 300)
    machine.passes(60_000)
    assert machine.used_milli("a", 60_000) == 300
    machine.loads["a"].end(machine.loads["a"].begin(1, 1, machine.devices[0]))
    assert machine.used_milli("a", 50_000) == 300


def test_short_pieces_do_not_make_what_was_used_forgotten(machine: Machine) -> None:
    load = machine.process("a")
    for _ in range(4000):
        piece = load.begin(0.001, 1000, machine.devices[0])
        machine.now_ns += MS // 2
        load.end(piece)
        machine.now_ns += MS // 2
    assert machine.used_milli("a", 3000) == pytest.approx(500, abs=5)


# -- real processes --------------------------------------------------------------------------------------------------------


BEGIN = "!import threading; threading.Thread(target=cuda.launch, args=(600, {part}), daemon=True).start()"


def test_the_monitor_tells_what_each_process_uses_while_it_works(
    simulated: SimulatedHost, kernel: Kernel, monitor: SimulatedMonitor
) -> None:
    device = simulated.devices[0].device_id
    kernel.run(BEGIN.format(part=0.7))
    with Kernel(simulated) as other:
        other.run("!x = cuda.allocate(1 << 20)")
        begun_us = monitor.utilisation(device, 0).until_us

        def milli(pid: int) -> int:
            found = monitor.utilisation(device, max(begun_us, monitor.utilisation(device, 0).until_us - 200_000))
            return (found.by_pid or {}).get(pid, -1)

        eventually(lambda: abs(milli(kernel.pid) - 700) <= 2, "it uses what it says")
        assert milli(other.pid) == 0
        other.run("!from time import monotonic")
        began_s, _, ended_s = other.run("[monotonic(), cuda.launch(0.3, 0.8), monotonic()]")
        assert ended_s - began_s >= 0.3 * (0.2 + 0.8 * 1.5), "the other one slows it down"


def test_work_of_a_dead_process_slows_nothing_down_once_it_was_looked_for(
    simulated: SimulatedHost, kernel: Kernel, monitor: SimulatedMonitor
) -> None:
    device = simulated.devices[0].device_id
    stretch = f"[work := load.begin(1, 1000, {device!r}), load.end(work)] and work.stretch_milli"
    kernel.run(BEGIN.format(part=1))
    with Kernel(simulated) as other:
        other.run("!x = cuda.allocate(1 << 20); load = cuda._current().load")
        eventually(lambda: other.run(stretch) == 2000, "both work")
        kernel.kill()
        monitor.use(device)
        eventually(lambda: other.run(stretch) == 1000, "nothing else works there")
        assert set(monitor.utilisation(device, 0).by_pid or {}) == {other.pid}


@pytest.mark.parametrize("part", ["0", "1.5", "-1", "float('nan')"])
def test_work_uses_a_part_of_the_device(kernel: Kernel, part: str) -> None:
    with pytest.raises(KernelError, match="give a number above 0 and at most 1"):
        kernel.run(f"cuda.launch(1, {part})")
