"""A sample of removing the product's files under suspended kernels; `tests/run wiping` removes everything."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.kept import Kept
from tests.support.wiping import Case, Stage, new_stage, play

pytestmark = pytest.mark.promise("removed-files")

# In a swap; at rest see `test_wiped_files` (alive) and `test_lost_ledger` (killed).
SAMPLE = [
    Case(kind="everything", moment="swap", alive=False),
    Case(kind="everything", moment="swap", alive=True),
]


@pytest.fixture(scope="module")
def kept_stage() -> Iterator[Kept[Stage]]:
    with Kept(new_stage) as kept:
        yield kept


@pytest.fixture
def stage(kept_stage: Kept[Stage], has_failed: Callable[[], bool]) -> Iterator[Stage]:
    with kept_stage.taken(has_failed) as stage:
        yield stage


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_every_byte_comes_back_whatever_is_removed(case: Case, stage: Stage) -> None:
    outcome = play(case, stage)
    assert len(outcome.commands) <= 1
