"""A simulated device draws its idle power at all times, and more by how much of it is used, as far as its counter is read."""

import pytest

from fractional_gpu.gpu.simulated.host import SimulatedHost
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from tests.gpu_sim.kernels import Kernel
from tests.gpu_sim.machine import Machine

pytestmark = pytest.mark.promise("energy")

IDLE_MW, PEAK_MW = 75_000, 700_000


def test_a_device_at_rest_draws_its_idle_power(machine: Machine) -> None:
    assert machine.counter() == 0
    machine.passes(10_000)
    assert (machine.sensors().power_mw, machine.counter()) == (IDLE_MW, 10 * IDLE_MW)


def test_work_draws_by_how_much_it_uses(machine: Machine) -> None:
    machine.works("a", 400)
    machine.works("b", 600)
    machine.works("c", 100, device=1)
    machine.passes(2000)
    assert (machine.sensors().power_mw, machine.counter()) == (PEAK_MW, 2 * PEAK_MW)
    assert (machine.sensors(1).power_mw, machine.counter(1)) == (IDLE_MW + 62_500, 2 * (IDLE_MW + 62_500))


def test_a_device_never_draws_more_than_its_peak_however_much_is_asked_of_it(machine: Machine) -> None:
    for key in "abcd":
        machine.works(key, 900)
    machine.passes(1000)  # each sees the others after a step
    before_mj = machine.counter()
    machine.passes(5_000)
    assert machine.counter() - before_mj == pytest.approx(5 * PEAK_MW, rel=1e-2)


def test_each_device_counts_what_was_done_on_it(machine: Machine) -> None:
    load = machine.process("a")
    for device, ms in ((0, 1000), (1, 300), (0, 200)):
        machine.counter(0), machine.counter(1)
        machine.move("a", device)
        piece = load.begin(600, 1000, machine.devices[device])
        machine.passes(ms)
        load.end(piece)
        machine.counter(0), machine.counter(1)
    machine.end("a")
    range_mw = PEAK_MW - IDLE_MW
    assert machine.counter(0) == pytest.approx(1.5 * IDLE_MW + 1.2 * range_mw, rel=1e-3)
    assert machine.counter(1) == pytest.approx(1.5 * IDLE_MW + 0.3 * range_mw, rel=1e-3)


def test_what_a_process_did_stays_counted_after_its_end(machine: Machine) -> None:
    machine.works("a", 1000)
    machine.passes(1000)
    before_mj = machine.counter()
    machine.end("a")
    assert machine.counter() == before_mj == PEAK_MW


def test_a_killed_process_draws_nothing_for_long(machine: Machine) -> None:
    machine.works("a", 1000, seconds=1)
    machine.passes(500)
    machine.kill("a")
    machine.passes(10_000)
    assert machine.counter() <= 10.5 * IDLE_MW + 1.01 * (PEAK_MW - IDLE_MW)


def test_the_counter_never_goes_back_while_processes_come_and_go(
    simulated: SimulatedHost, monitor: SimulatedMonitor
) -> None:
    device = simulated.devices[0].device_id
    said = [0]
    with Kernel(simulated) as kernel:
        for _ in range(10):
            kernel.run("cuda.launch(0.01, 0.5)")
            said.append(monitor.sensors(device).energy_mj or 0)
            kernel.run("cuda.reset()")
            said.append(monitor.sensors(device).energy_mj or 0)
    assert said == sorted(said)
    assert said[-1] > 0
