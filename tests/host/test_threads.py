"""Blocking work gets a thread even while the system refuses some."""

import errno
import threading
from collections.abc import Iterator

import pytest

from fractional_gpu.host.threads import StartedThreads


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def threads() -> Iterator[StartedThreads]:
    with StartedThreads(3, "work") as made:
        yield made


def test_all_threads_run_at_once_where_no_more_can_be_started(
    threads: StartedThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    meeting = threading.Barrier(3)
    for _ in range(2):  # also after they were free once
        assert sorted(work.result(60) for work in [threads.submit(meeting.wait, 60) for _ in range(3)]) == [0, 1, 2]
    assert [threads.submit(len, "work").result(60) for _ in range(5)] == [4] * 5


@pytest.mark.parametrize("there", [0, 2])
def test_a_pool_that_cannot_have_all_its_threads_is_none(monkeypatch: pytest.MonkeyPatch, there: int) -> None:
    before, really_start, started = threading.active_count(), threading.Thread.start, list[threading.Thread]()

    def start_some(thread: threading.Thread) -> None:
        if len(started) == there:
            refuse(thread)
        really_start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(OSError, match="can't start new thread") as caught:
        StartedThreads(3, "work")
    assert caught.value.errno == errno.EAGAIN
    for thread in started:
        thread.join(60)
    assert threading.active_count() == before
