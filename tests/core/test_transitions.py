"""The table of legal moves, and its diagram in the documents."""

from itertools import product

import pytest

from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.transitions import TABLE, Cause, IllegalTransitionError, diagram, next_state
from tests.core.moves import MOVES
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "lease-states.md"


def test_the_picture_in_the_documents_is_current() -> None:
    assert f"```mermaid\n{diagram()}```" in PAGE.read_text(encoding="utf-8"), (
        "the table has changed: put the output of `python -m fractional_gpu.core.transitions` into docs/lease-states.md"
    )


def test_the_table_allows_no_move_that_the_design_does_not_know() -> None:
    unknown = [
        (old, cause, new)
        for old, moves in TABLE.items()
        for cause, new in moves.items()
        if new not in MOVES.get(old, {}) and (old, new) != (LeaseState.QUARANTINED, LeaseState.QUARANTINED)
    ]
    assert unknown == []


def test_the_table_allows_every_move_that_the_design_knows() -> None:
    missing = [(old, new) for old, moves in MOVES.items() for new in moves if new not in TABLE[old].values()]
    assert missing == []


@pytest.mark.parametrize(
    ("old", "cause"),
    [(old, cause) for old, cause in product(LeaseState, Cause) if cause not in TABLE[old]],
    ids=str,
)
def test_a_move_that_is_not_in_the_table_is_an_error(old: LeaseState, cause: Cause) -> None:
    with pytest.raises(IllegalTransitionError, match=f"a lease that is {old} cannot change state because of"):
        next_state(old, cause)


def test_an_ended_lease_moves_no_more() -> None:
    assert TABLE[LeaseState.ENDED] == {}
