"""What devices say of the power that they draw, and how they fail to."""

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, Monitor
from tests.gpu_behaviour.hosts import Host


def test_a_device_says_what_it_draws_and_what_it_has_drawn(host: Host, monitor: Monitor) -> None:
    for device_id in host.devices:
        seen = monitor.sensors(device_id)
        assert seen.power_mw is not None
        assert 10_000 <= seen.power_mw <= 1_000_000
        assert seen.energy_mj is not None
        assert seen.energy_mj >= 0


@pytest.mark.parametrize(("power", "counter"), [(True, False), (False, False), (True, True)])
def test_a_device_may_have_no_counter_or_say_nothing_of_power(
    host: Host, monitor: Monitor, *, power: bool, counter: bool
) -> None:
    host.show_sensors(1, power=power, counter=counter)
    first, second = (monitor.sensors(device_id) for device_id in host.devices)
    assert (second.power_mw is not None, second.energy_mj is not None) == (power, counter)
    assert second.busy_percent == 0
    assert None not in (first.power_mw, first.energy_mj)


@pytest.mark.parametrize("energy_mj", [0, 10**15])
def test_a_counter_may_begin_anew_or_jump(host: Host, monitor: Monitor, energy_mj: int) -> None:
    device_id = host.devices[0]
    host.set_counter(0, 5_000_000)
    before = monitor.sensors(device_id)
    assert before.energy_mj is not None
    assert before.energy_mj >= 5_000_000
    host.set_counter(0, energy_mj)
    after = monitor.sensors(device_id)
    assert after.energy_mj is not None
    assert energy_mj <= after.energy_mj <= energy_mj + 100_000


def test_a_reading_that_failed_does_not_spoil_the_next_one(host: Host, monitor: Monitor) -> None:
    host.fail("sensors", GPUErrorCode.UNKNOWN)
    with pytest.raises(GPUError) as caught:
        monitor.sensors(host.devices[0])
    assert caught.value.code is GPUErrorCode.UNKNOWN
    assert monitor.sensors(host.devices[0]).energy_mj is not None


def test_a_lost_device_and_one_that_is_none_have_no_sensors(host: Host, monitor: Monitor) -> None:
    host.lose(0)
    for device_id, code in ((host.devices[0], GPUErrorCode.DEVICE_LOST), ("GPU-none", GPUErrorCode.NO_SUCH_DEVICE)):
        with pytest.raises(GPUError) as caught:
            monitor.sensors(device_id)
        assert caught.value.code is code
    assert monitor.sensors(host.devices[1]).power_mw is not None
