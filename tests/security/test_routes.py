"""Every route of the API, tried in every role: no user reaches what is another's."""

import pytest

from fractional_gpu.protocol.routes import ADMIN, ANYONE, KERNEL, LEASE, RELEASE, ROUTES, Route
from tests.broker.live import live_broker
from tests.security.routes import ROLES, Cell, end_as_stranger, probe, table
from tests.support.paths import ROOT

pytestmark = pytest.mark.promise("own-leases")

PAGE = ROOT / "docs" / "routes.md"
CALLERS = {
    ANYONE: "ping metrics status capacity events usage budgets create",  # what they show, or give, is one's own
    LEASE: "lease cost expect history others resize story unpin end resume suspend note pin release",
    KERNEL: "attach detach acquire follow gate answer",
    ADMIN: "extend offers take drain undrain pools change seats unseat confirm move evict",
}
"""By who may call them: the names of the routes. A new route needs a place here."""
UNKNOWN = dict.fromkeys(("another user", "another user, with the lease's token"), "unknown-lease")
OWNERS = ("owner, with the lease's token", "owner, without a token")
FOREIGN = {"owner, with another lease's token": "foreign-token"}


def refusals(route: Route) -> dict[str, str]:  # type: ignore[type-arg]
    """Return the reason of the refusal for each role that is refused."""
    (who,) = [who for who, names in CALLERS.items() if route.name in names.split()]
    if route is RELEASE:  # of another user's lease: answered like one that has ended, without effect
        return FOREIGN
    if who == ADMIN and "{lease}" not in route.path:
        return dict.fromkeys([role for role in ROLES if role != "administrator"], "not-admin")
    return {
        ANYONE: {},
        LEASE: FOREIGN | UNKNOWN,
        KERNEL: FOREIGN | UNKNOWN | dict.fromkeys(("administrator", "owner, without a token"), "no-token"),
        ADMIN: FOREIGN | UNKNOWN | dict.fromkeys(OWNERS, "not-admin"),
    }[who]


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    with live_broker() as live:
        return probe(live)


def test_the_page_says_what_a_broker_does(cells: list[Cell]) -> None:
    assert PAGE.read_text() == table(cells), "write it again: python -m tests.security.routes > docs/routes.md"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_each_route_refuses_every_caller_but_its_own(route: Route, cells: list[Cell]) -> None:  # type: ignore[type-arg]
    mine = [cell for cell in cells if cell.route is route]
    assert {cell.role for cell in mine} == set(ROLES)
    assert {cell.role: cell.refused for cell in mine if cell.refused} == refusals(route)


def test_a_lease_that_another_user_tried_to_end_lives_on() -> None:
    with live_broker() as live:
        assert end_as_stranger(live) == "unattached"
