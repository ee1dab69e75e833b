"""What the product keeps on disk is removed under suspended kernels, a sample: `tests/run wiping` takes everything."""

import pytest

from tests.support.wiping import CASES, KINDS, Case, play

SAMPLE = [
    Case(kind="everything", moment="rest", alive=False),
    Case(kind="everything", moment="swap", alive=False),
    Case(kind="ledger with its log", moment="swap", alive=False),
    Case(kind="product folder", moment="swap", alive=True),
    Case(kind="runtime folder", moment="rest", alive=False),
    Case(kind="everything", moment="swap", alive=True),
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_every_byte_comes_back_whatever_is_removed(case: Case) -> None:
    outcome = play(case)
    assert len(outcome.commands) <= 1


def test_the_command_takes_every_kind_at_every_moment() -> None:
    assert len(CASES) == 4 * len(KINDS)
    assert set(SAMPLE) <= set(CASES)
