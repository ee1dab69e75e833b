"""A small crowd in random use for a few seconds. `tests/run load` takes 200 kernels and ten minutes."""

import pytest

from tests.e2e.load import Plan, run_load
from tests.support.crowd import Size

pytestmark = pytest.mark.promise("crowd")


def test_a_crowd_loses_no_byte_and_leaves_nothing_behind() -> None:
    size = Size(kernels=3, devices=1, servers=1, users=2)
    result = run_load(size, Plan(use_s=1, rest_s=1, rounds=20))
    assert "3 kernels" in result.table()
