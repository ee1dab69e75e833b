"""One live broker for the tests of a module that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.broker.live import LiveBroker, live_broker


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live
