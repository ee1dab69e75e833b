"""Faults of the simulation; what they do to processes with any driver is in tests/gpu_behaviour."""

import pytest

from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.simulated.store import SimulatedHostError
from tests.support import faults


@pytest.mark.parametrize(
    ("operation", "fault", "times"),
    [
        ("reset", "hang", 1),
        ("lock", "explode", 1),
        ("lock", "fail", 1),
        ("lock", "fail:nonsense", 1),
        ("lock", "slow", 1),
        ("lock", "slow:x", 1),
        ("lock", "late:", 1),
        ("lock", "hang:5", 1),
        ("lock", "lie:running", 1),
        ("state", "lie", 1),
        ("lock", "hang", 0),
    ],
)
def test_a_fault_that_is_none_is_refused(simulated: host.SimulatedHost, operation: str, fault: str, times: int) -> None:
    with pytest.raises(SimulatedHostError):
        faults.inject(simulated.directory, operation, fault, times=times)
    assert faults.listed(simulated.directory) == []
