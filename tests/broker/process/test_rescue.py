"""Even without a broker, no process is restored just to find out whether there is room."""

from pathlib import Path
from typing import cast

import pytest

from fractional_gpu.broker.process.driver_start import Backend
from fractional_gpu.broker.process.rescue import _FoundKernel, _Rescuer
from fractional_gpu.config import Settings
from fractional_gpu.gpu.interface import DeviceInfo, ProcessState
from tests.broker.driver import DEVICE, Driver, kernel_of, swaps_of


class OneDevice:
    """A backend that uses the test's driver."""

    def __init__(self, driver: Driver) -> None:
        self.monitor = driver

    @property
    def devices(self) -> list[DeviceInfo]:
        return self.monitor.devices()[:1]


@pytest.mark.parametrize("saved_mib", [None, 0])
async def test_saved_state_of_unknown_size_comes_back_only_to_an_empty_device(saved_mib: int | None) -> None:
    driver = Driver()
    async with kernel_of() as (kernel, _, pids):
        driver.has_context(pids[0], ProcessState.CHECKPOINTED, 300)
        driver.has_context(1, ProcessState.RUNNING, 900)
        found = _FoundKernel(kernel=kernel, label="", device_id=DEVICE, saved_mib=saved_mib)
        backend = cast("Backend", OneDevice(driver))
        rescuer = _Rescuer(swaps_of(driver), cast("Settings", None), backend, Path())
        assert (await rescuer.bring_back(found))[0] == "no-room"
        assert driver.calls == []
        del driver.states[1], driver.mib[1]
        assert await rescuer.bring_back(found) == ("restored", "its memory is on the device again")
