"""A subscriber gets the current status at once and every change soon, nothing twice, and only its own leases."""

import os
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from queue import Queue

import pytest
from msgspec.structs import replace

from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.services import status
from fractional_gpu.broker.services.status import StatusStream, Viewer, host_status
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.status import HostChange, HostStatus
from tests.broker.live import DEADLINE_S, LiveBroker


class Following:
    """A client that follows the stream in a thread."""

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
        """Return the lines up to the first one with exactly these leases."""
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


def test_a_line_of_changes_has_what_changed_alone(live: LiveBroker) -> None:
    kept, ended = live.lease(), live.lease()

    async def story() -> None:
        stream = StatusStream(live.broker, live.socket).follow(Viewer())

        async def line() -> HostStatus | HostChange:
            while (status := await anext(stream)) is None:
                pass
            return status

        async with aclosing(stream):
            first = await line()
            assert isinstance(first, HostStatus)
            assert [one.lease_id for one in first.leases] == [kept.lease_id, ended.lease_id]
            kernel = live.broker.kernels[ended.lease_id]
            kernel.facts = replace(kernel.facts, suspends=kernel.facts.suspends + 1)
            live.broker.anything_changed.set()
            change = await line()
            assert isinstance(change, HostChange)
            assert [(one.lease_id, one.suspends) for one in change.changed.leases] == [(ended.lease_id, 1)]
            assert (change.changed.devices, change.ended) == ([], [])
            await live.broker.survivors.release(kernel)
            change = await line()
            assert isinstance(change, HostChange)
            assert change.ended == [ended.lease_id]
            assert kept.lease_id not in {one.lease_id for one in change.changed.leases}

    live.on_loop(story)
    live.call("DELETE", f"/v1/leases/{kept.lease_id}")


def test_each_line_has_what_is_left_before_a_deadline(live: LiveBroker) -> None:
    lease = live.lease()

    async def story() -> None:
        stream = StatusStream(live.broker, live.socket).follow(Viewer())

        async def line() -> HostStatus | HostChange:
            while (found := await anext(stream)) is None:
                pass
            return found

        async with aclosing(stream):
            assert isinstance(await line(), HostStatus)
            live.broker.host_deadline_ms = now_ms() + 30_000
            live.broker.note_change()
            change = await line()
            assert isinstance(change, HostChange)
            assert 0 < (change.changed.goes_away_in_ms or 0) <= 30_000
            assert [one.lease_id for one in change.changed.leases] == [lease.lease_id]
            live.broker.host_deadline_ms = now_ms() + 10_000
            live.broker.note_change()
            change = await line()
            assert isinstance(change, HostChange)
            assert 0 < (change.changed.leases[0].host_goes_away_in_ms or 0) <= 10_000
            live.broker.host_deadline_ms = None
            live.broker.note_change()
            change = await line()
            assert isinstance(change, HostChange)
            assert change.changed.goes_away_in_ms is None
            assert [one.host_goes_away_in_ms for one in change.changed.leases] == [None]

    live.on_loop(story)
    live.call("DELETE", f"/v1/leases/{lease.lease_id}")


def test_no_subscriber_sees_another_users_leases(live: LiveBroker) -> None:
    lease = live.lease()

    async def first_line(uid: int | None) -> HostStatus:
        async with aclosing(StatusStream(live.broker, live.socket).follow(Viewer(uid))) as news:
            async for status in news:
                if isinstance(status, HostStatus):
                    return status
        raise AssertionError("the stream ended too early")

    everything = live.on_loop(partial(first_line, None))
    own = live.on_loop(partial(first_line, os.getuid()))
    foreign = live.on_loop(partial(first_line, os.getuid() + 1))
    assert [one.lease_id for one in everything.leases] == [one.lease_id for one in own.leases] == [lease.lease_id]
    assert foreign.leases == []
    assert foreign.devices == own.devices
    live.call("DELETE", f"/v1/leases/{lease.lease_id}")


def test_a_quiet_stream_sends_keep_alives_and_costs_nothing_without_followers(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "PULSE_S", 0.05)
    looks = followers_asked = 0

    def counted(*arguments: object) -> HostStatus:
        nonlocal looks
        looks += 1
        status: HostStatus = host_status(*arguments)  # type: ignore[arg-type]
        return replace(status, leases=[replace(lease, now_ms=looks) for lease in status.leases])

    def shown(*arguments: object) -> HostStatus:
        nonlocal followers_asked
        followers_asked += 1
        return seen_by(*arguments)  # type: ignore[arg-type]

    seen_by = status._seen_by
    monkeypatch.setattr(status, "host_status", counted)
    monkeypatch.setattr(status, "_seen_by", shown)
    lease = live.lease()
    stream = StatusStream(live.broker, live.socket)

    async def story() -> None:
        async with aclosing(stream.follow(Viewer())) as news:
            assert (await anext(news)) is not None
            while looks < 3:  # a lease that only gets older causes no message
                assert (await anext(news)) is None
        assert followers_asked == 1, "what is no news is not looked at for each follower"
        assert stream._sampling is None

    live.on_loop(story)
    live.call("DELETE", f"/v1/leases/{lease.lease_id}")
