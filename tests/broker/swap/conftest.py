"""Makes tests of swaps independent of the host memory of the machine that runs them."""

import pytest

from fractional_gpu.broker.swap import suspend as suspend_module
from tests.broker.swap.kernels import room_for


@pytest.fixture(autouse=True)
def _plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(100_000, "the test"))
