"""One live broker for all tests of a module: no request of one test may disturb the next, which is a promise as well."""

import logging
from collections.abc import Iterator

import pytest

from tests.broker.live import LiveBroker, live_broker


@pytest.fixture(scope="module")
def _live() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live


@pytest.fixture
def live(_live: LiveBroker, caplog: pytest.LogCaptureFixture) -> Iterator[LiveBroker]:
    """The module's broker; it must still answer after each test."""
    yield _live
    assert _live.is_alive()
    failures = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert not failures, "what was sent is the sender's fault, and no error of the broker's"
