"""Every route of the API, tried in every role: no user reaches another's leases."""

import pytest

from fractional_gpu.protocol.routes import ANYONE, RELEASE, ROUTES
from tests.broker.live import live_broker
from tests.security.routes import Cell, end_as_stranger, probe, table
from tests.support.paths import ROOT

pytestmark = pytest.mark.promise("own-leases")

PAGE = ROOT / "docs" / "routes.md"
OPEN_TO_ALL = {
    "ping",
    "metrics",
    "status",
    "capacity",
    "events",
    "usage",
    "budgets",
    "create",
}  # what they show or give is the caller's own
TOKEN_ONLY = {"attach", "detach", "acquire", "follow", "gate", "answer"}


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    with live_broker() as live:
        return probe(live)


def test_the_page_says_what_a_broker_does(cells: list[Cell]) -> None:
    assert PAGE.read_text() == table(cells), "write it again: python -m tests.security.routes > docs/routes.md"


def test_what_is_open_to_all_is_ones_own() -> None:
    assert {route.name for route in ROUTES if route.who == ANYONE} == OPEN_TO_ALL


def test_another_user_gets_at_nothing_even_with_a_stolen_token(cells: list[Cell]) -> None:
    strangers = [cell for cell in cells if cell.role.startswith("another user") and cell.route.who != ANYONE]
    assert strangers
    let_through = [cell for cell in strangers if not cell.refused]
    # Ending another user's lease is answered like ending one that has ended.
    assert [cell.route for cell in let_through] == [RELEASE] * 2


def test_what_a_kernel_does_for_itself_needs_its_own_token(cells: list[Cell]) -> None:
    own = [cell for cell in cells if cell.route.name in TOKEN_ONLY]
    assert {cell.route.name for cell in own} == TOKEN_ONLY
    let_through = {cell.role for cell in own if not cell.refused}
    assert let_through == {"owner, with the lease's token"}


def test_another_leases_token_opens_nothing(cells: list[Cell]) -> None:
    wrong = [cell for cell in cells if "another lease's" in cell.role and "{lease}" in cell.route.path]
    assert {cell.refused for cell in wrong} == {"foreign-token"}


def test_seats_and_devices_are_for_administrators(cells: list[Cell]) -> None:
    restricted = [cell for cell in cells if any(noun in cell.route.path for noun in ("seats", "offers", "devices"))]
    assert restricted
    assert {cell.role for cell in restricted if not cell.refused} == {"administrator"}


def test_a_lease_that_another_user_tried_to_end_lives_on() -> None:
    with live_broker() as live:
        assert end_as_stranger(live) == "unattached"
