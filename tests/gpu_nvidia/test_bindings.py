"""The double of the driver against what was recorded of the real bindings, of several releases (see record_bindings)."""

import json
from importlib import metadata
from typing import Any

import pytest

from fractional_gpu.gpu.nvidia import checkpointer
from fractional_gpu.gpu.nvidia.support import why_no_bindings
from tests.gpu_nvidia.fake_driver import FakeDriver, GpuPair, LockArgs, RestoreArgs, Result, StateNumber
from tests.gpu_nvidia.record_bindings import PROBE_CALLS, RECORD, calls_of, classes_of

pytestmark = pytest.mark.promise("driver-bytes")

RECORDED: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
NEWEST = max(RECORDED, key=lambda version: tuple(map(int, version.split("."))))
DOUBLES = {"CUcheckpointLockArgs": LockArgs, "CUcheckpointRestoreArgs": RestoreArgs, "CUcheckpointGpuPair": GpuPair}


def test_the_record_has_releases_of_each_kind() -> None:
    assert {"12.8.0", "13.0.1"} < set(RECORDED), "the oldest that is allowed, and one that cannot restore"
    assert int(NEWEST.split(".")[0]) >= 13


@pytest.mark.parametrize("version", RECORDED)
def test_calls_have_the_names_and_the_number_of_arguments_that_the_double_has(version: str) -> None:
    recorded = {name: count for name, count in RECORDED[version]["calls"].items() if name not in PROBE_CALLS}
    bound = {name: count - 1 for name, count in calls_of(FakeDriver).items()}  # the first is `self`
    assert recorded.items() <= bound.items()
    if not why_no_bindings_of(version):
        assert recorded == bound


@pytest.mark.parametrize("version", RECORDED)
def test_releases_without_what_is_needed_are_refused_by_their_number_and_no_others(version: str) -> None:
    lacking = set(checkpointer._CALLS) - set(RECORDED[version]["calls"])
    assert bool(why_no_bindings_of(version)) is bool(lacking)


def why_no_bindings_of(version: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda _name: version)
        return why_no_bindings()


def test_arguments_have_the_attributes_that_are_set() -> None:
    assert set(classes_of(FakeDriver)) == set(DOUBLES)
    for name, double in DOUBLES.items():
        assert set(double.__annotations__) <= set(RECORDED[NEWEST]["attributes"][name])


@pytest.mark.parametrize("version", RECORDED)
def test_results_and_states_have_the_numbers_that_the_double_gives(version: str) -> None:
    assert RECORDED[version]["results"] == {one.name: int(one) for one in Result}
    assert RECORDED[version]["states"].items() <= {one.name: int(one) for one in StateNumber}.items()


def test_each_number_that_means_something_has_the_name_that_was_meant() -> None:
    names = {int(one): one.name for one in Result}
    assert {names[number] for number in checkpointer._CODES} <= set(RECORDED[NEWEST]["results"])
    assert RECORDED[NEWEST]["states"] == {one.name: int(one) for one in StateNumber}
    words = {number: word.value.upper() for number, word in checkpointer._STATES.items()}
    assert words == {int(one): one.name.removeprefix("CU_PROCESS_STATE_") for one in StateNumber}


def test_the_probe_process_calls_are_there() -> None:
    assert set(PROBE_CALLS) <= set(RECORDED[NEWEST]["calls"])
