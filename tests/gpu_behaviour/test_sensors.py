"""What devices report about the power that they draw, and how that fails."""

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, Monitor
from tests.gpu_behaviour.hosts import Host

pytestmark = pytest.mark.promise("energy")


def test_a_device_says_what_it_draws_and_what_it_has_drawn(host: Host, monitor: Monitor) -> None:
    for device_id in host.devices:
        seen = monitor.sensors(device_id)
        assert seen.power_mw is not None
        assert 10_000 <= seen.power_mw <= 1_000_000
        assert seen.energy_mj is not None
        assert seen.energy_mj >= 0


def test_a_lost_device_and_one_that_is_none_have_no_sensors(host: Host, monitor: Monitor) -> None:
    host.lose(0)
    for device_id, code in ((host.devices[0], GPUErrorCode.DEVICE_LOST), ("GPU-none", GPUErrorCode.NO_SUCH_DEVICE)):
        with pytest.raises(GPUError) as caught:
            monitor.sensors(device_id)
        assert caught.value.code is code
    assert monitor.sensors(host.devices[1]).power_mw is not None
