"""Who follows the broker's news hears the present state at once, every change soon, nothing twice, and of their own leases only."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from queue import Queue

import pytest

from fractional_gpu.broker.services import status_stream as feed_module
from fractional_gpu.broker.services.status import host_status
from fractional_gpu.broker.services.status_stream import RATE_S, Feed
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.messages import HostStatus
from tests.broker.live import DEADLINE_S, LiveBroker


class Following:
    """A client that follows in a thread."""

    def __init__(self, socket: str) -> None:
        self.client = BrokerClient(socket)
        self.lines: Queue[HostStatus] = Queue()
        self.ended: BrokerUnavailableError | None = None
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self) -> None:
        try:
            for status in self.client.events():
                self.lines.put(status)
        except BrokerUnavailableError as error:
            self.ended = error

    def until_leases(self, expected: set[str]) -> list[HostStatus]:
        """Return the lines up to the first that has exactly these leases."""
        lines = [self.lines.get(timeout=DEADLINE_S)]
        while {lease.lease_id for lease in lines[-1].leases} != expected:
            lines.append(self.lines.get(timeout=DEADLINE_S))
        return lines

    def close(self) -> None:
        self.client.close()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


@contextmanager
def following(live: LiveBroker) -> Iterator[Following]:
    follower = Following(live.socket)
    try:
        yield follower
    finally:
        follower.close()


def test_the_present_comes_at_once_and_then_what_changes(live: LiveBroker) -> None:
    first = live.lease()
    with following(live) as follower:
        (present,) = follower.until_leases({first.lease_id})
        assert [device.memory_mib for device in present.devices] == [1024]
        second = live.lease(label="another")
        follower.until_leases({first.lease_id, second.lease_id})
        for lease in (first, second):
            live.call("DELETE", f"/v1/leases/{lease.lease_id}")
        follower.until_leases(set())
    assert isinstance(follower.ended, BrokerUnavailableError)  # closed from the other thread


def test_many_changes_at_once_are_few_lines(live: LiveBroker) -> None:
    with following(live) as follower:
        follower.until_leases(set())
        begun_s = time.monotonic()
        for _ in range(40):
            live.call("DELETE", f"/v1/leases/{live.lease().lease_id}")
        last = live.lease()
        lines = follower.until_leases({last.lease_id})
        assert len(lines) <= (time.monotonic() - begun_s) / RATE_S + 2
        live.call("DELETE", f"/v1/leases/{last.lease_id}")


def test_nobody_hears_of_another_users_leases(live: LiveBroker) -> None:
    lease = live.lease()

    async def first_line(uid: int | None) -> HostStatus:
        async with aclosing(Feed(live.broker, live.socket).follow(uid)) as news:
            async for status in news:
                if status is not None:
                    return status
        raise AssertionError("the feed ended by itself")

    everything = live.on_loop(partial(first_line, None))
    own = live.on_loop(partial(first_line, os.getuid()))
    foreign = live.on_loop(partial(first_line, os.getuid() + 1))
    assert [one.lease_id for one in everything.leases] == [one.lease_id for one in own.leases] == [lease.lease_id]
    assert foreign.leases == []
    assert foreign.devices == own.devices
    live.call("DELETE", f"/v1/leases/{lease.lease_id}")


def test_quiet_is_a_keep_alive_and_costs_nothing_when_nobody_follows(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "PULSE_S", 0.05)
    looks = followers_asked = 0

    def counted(*arguments: object) -> HostStatus:
        nonlocal looks
        looks += 1
        status: HostStatus = host_status(*arguments)  # type: ignore[arg-type]
        return replace(status, leases=[replace(lease, age_ms=looks) for lease in status.leases])

    def shown(*arguments: object) -> HostStatus:
        nonlocal followers_asked
        followers_asked += 1
        return seen_by(*arguments)  # type: ignore[arg-type]

    seen_by = feed_module._seen_by
    monkeypatch.setattr(feed_module, "host_status", counted)
    monkeypatch.setattr(feed_module, "_seen_by", shown)
    lease = live.lease()
    feed = Feed(live.broker, live.socket)

    async def story() -> None:
        async with aclosing(feed.follow(None)) as news:
            assert (await anext(news)) is not None
            while looks < 3:  # a lease that only becomes older is no news
                assert (await anext(news)) is None
        assert followers_asked == 1, "what is no news is not looked at for each follower"
        assert feed._looking is None

    live.on_loop(story)
    live.call("DELETE", f"/v1/leases/{lease.lease_id}")


def test_a_look_that_fails_is_told_to_who_follows(live: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PULSE_S", 0.05)

    def broken(*_arguments: object) -> HostStatus:
        raise ZeroDivisionError

    monkeypatch.setattr(feed_module, "host_status", broken)

    async def story() -> None:
        async with aclosing(Feed(live.broker, live.socket).follow(None)) as news:
            await anext(news)

    with pytest.raises(ZeroDivisionError):
        live.on_loop(story)
