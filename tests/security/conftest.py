"""One live broker for a module's tests that do not change it."""

from collections.abc import Iterator

import pytest

from tests.broker.live import LiveBroker, live_broker


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live
