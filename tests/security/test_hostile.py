"""One user's requests and files cost other users a bounded amount of work. Needs root: the users are real.

Each test runs a real attack (`tests/support/attacks.py`) against a live broker and asserts causes: what was read, where, and how much
work was done for the attacker before another user was answered. `tests/benchmarks/hostile.py` measures the effects at full size.
"""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.broker.api import server
from fractional_gpu.broker.api.handler import Handler
from fractional_gpu.broker.kernels import process_inspector
from fractional_gpu.broker.kernels.iopub import _LONGEST_FRAME, _LONGEST_STATUS, IOPubWatch
from fractional_gpu.host import process
from fractional_gpu.host.process import MOST_BYTES, Snapshot, scan
from tests.broker.live import LiveBroker, live_broker
from tests.support.callers import Caller, caller
from tests.support.hostile import attacking
from tests.support.waiting import until

pytestmark = pytest.mark.promise("hostile")

USER, ATTACKER = (base + os.getpid() % 10_000 for base in (70_000, 80_000))  # other tests attack at the same time
MOST_ANSWERS = 40
"""How often the broker may answer the attacker between another user's question and its answer. Without turns it is hundreds."""
LONGEST_STEP_S = 0.3  # of processor time, of which a busy machine needs three times as much
PINGS = 5


class Seen:
    """Records the broker's work."""

    def __init__(self) -> None:
        self.answers: list[int] = []  # uids, in order
        self.read = Counter[str]()  # bytes read from files whose size a process chooses, by path
        self.read_in: set[int] = set()  # threads that read such files
        self.loop_thread = 0
        self.longest_step_s = 0.0
        self.shared: list[str] = []  # work in the shared executor
        self.scans = self.scanning = self.most_scanning = 0
        self.refused = 0  # by their heads
        self.bodies = 0  # bytes read of the attacker's bodies
        self.hashed = 0  # bytes of kernels' messages that were verified
        self.frames = [0]  # the largest part of each message

    def answer(self, handler: Handler, *_: object) -> None:
        self.loop_thread = threading.get_ident()
        self.answers.append(handler.stream.credentials.uid)

    def refuse(self, _admission: object, _error: object) -> None:
        self.refused += 1

    def body(self, admission: server._Admission, chunk: bytes) -> None:
        if admission._stream.credentials.uid == ATTACKER:
            self.bodies += len(chunk)

    def hash(self, _watch: object, parts: list[bytes]) -> None:
        self.hashed += sum(map(len, parts))

    def message(self, _watch: object, frames: list[bytes]) -> None:
        self.frames.append(max(map(len, frames)))

    def environments(self) -> list[int]:
        """Return what was read of each large environment of the attacker's processes."""
        return [
            size
            for path, size in self.read.items()
            if path.endswith("/environ") and size > 1 << 20 and Path(path).parent.stat().st_uid == ATTACKER
        ]


def before(patch: pytest.MonkeyPatch, target: object, name: str, note: Callable[..., None]) -> None:
    """Call `note` before the target's function, with the same arguments."""
    real = getattr(target, name)

    def noted(*words: Any) -> Any:  # noqa: ANN401 - the function's own
        note(*words)
        return real(*words)

    patch.setattr(target, name, noted)


def count_pieces(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    real = process.pieces

    def pieces(path: str, folder: int | None = None) -> Iterator[bytes]:
        whole = f"{Path(f'/proc/self/fd/{folder}').readlink()}/{path}" if folder is not None else path
        seen.read_in.add(threading.get_ident())
        for piece in real(path, folder):
            seen.read[whole] += len(piece)
            yield piece

    patch.setattr(process, "pieces", pieces)


def count_scans(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    def counted(name: str, uids: Collection[int] | None = None) -> Snapshot:
        seen.scans += 1
        seen.scanning += 1
        seen.most_scanning = max(seen.most_scanning, seen.scanning)
        try:
            return scan(name, uids)
        finally:
            seen.scanning -= 1

    patch.setattr(process_inspector, "scan", counted)


def time_steps(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    real = asyncio.Handle._run

    def run(handle: asyncio.Handle) -> None:
        begun_s = time.thread_time()
        real(handle)
        if threading.get_ident() == seen.loop_thread:
            seen.longest_step_s = max(seen.longest_step_s, time.thread_time() - begun_s)

    patch.setattr(asyncio.Handle, "_run", run)


async def watch_shared_executor(seen: Seen) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, int)  # makes it
    before_all, name = vars(loop)["_default_executor"], "submit"
    real = getattr(before_all, name)
    setattr(before_all, name, lambda act, *words: seen.shared.append(repr(act)) or real(act, *words))  # type: ignore[func-returns-value]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Watch the broker that the test starts next."""
    seen = Seen()
    count_pieces(monkeypatch, seen)
    count_scans(monkeypatch, seen)
    time_steps(monkeypatch, seen)
    before(monkeypatch, Handler, "reply_with", seen.answer)
    before(monkeypatch, server._Admission, "_refuse", seen.refuse)
    before(monkeypatch, server._Admission, "data_received", seen.body)
    before(monkeypatch, IOPubWatch, "_sign", seen.hash)
    before(monkeypatch, IOPubWatch, "_take", seen.message)
    return seen


@pytest.fixture
def live(seen: Seen) -> Iterator[LiveBroker]:
    with live_broker() as live:
        live.on_loop(lambda: watch_shared_executor(seen))
        yield live


@contextmanager
def other(live: LiveBroker) -> Iterator[Caller]:
    """A process of another user."""
    with caller(live.socket, first=f"os.setgroups([]); os.setgid({USER}); os.setuid({USER})") as one:
        yield one


def bounded(live: LiveBroker, seen: Seen, name: str, enough: Callable[[], bool]) -> dict[str, Any]:
    """Attack until enough was tried, while another user asks; check that each answer comes after a bounded amount of work."""
    with other(live) as asker:
        asker.call("GET", "/v1/ping")
        with attacking(live.socket, name, uid=ATTACKER) as got:
            until(enough, f"the attack {name} is under way")
            done = []
            for _ in range(PINGS):
                before = len(seen.answers)
                assert asker.call("GET", "/v1/ping")[0] == 200
                done.append(seen.answers[before:].count(ATTACKER))
        assert sorted(done)[PINGS // 2] <= MOST_ANSWERS, done
        assert seen.longest_step_s < LONGEST_STEP_S
    return got[name]


def answered(seen: Seen, most: int) -> Callable[[], bool]:
    return lambda: seen.answers.count(ATTACKER) >= most


# -- /proc ---------------------------------------------------------------------------------------------------------------


def test_an_environment_that_a_process_enlarges_is_not_read_without_a_lease_and_else_in_part(
    live: LiveBroker, seen: Seen
) -> None:
    live.broker.scans.kernels = live.broker.kernels  # as after the start
    with attacking(live.socket, "environ:32", uid=ATTACKER):
        live.broker.scans.take()
        assert seen.environments() == []
        scan("JUPYTER_GPU_LEASE")  # as a recovery does
        assert seen.environments() == [MOST_BYTES]


def test_a_process_with_a_large_environment_that_attaches_is_read_in_part_and_off_the_loop(
    live: LiveBroker, seen: Seen
) -> None:
    def read() -> bool:
        return seen.answers.count(ATTACKER) >= 9 and any(size >= MOST_BYTES for size in list(seen.read.values()))

    got = bounded(live, seen, "environ-lease:32", read)
    assert got["attached"] > 0
    assert seen.loop_thread not in seen.read_in
    assert all("environ" not in one for one in seen.shared)


# -- bodies ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [1, 200])
def test_bodies_in_chunks_are_refused_and_nothing_of_them_is_read(live: LiveBroker, seen: Seen, lines: int) -> None:
    got = bounded(live, seen, f"slow-bodies:{lines}", lambda: seen.refused >= 20)
    assert "200" not in got  # the attacker may be too slow to read any answer
    assert seen.bodies == 0


@pytest.mark.parametrize("name", ["json:20", "json:300", "json-attach:40"])
def test_large_bodies_are_decoded_at_once_and_charged(live: LiveBroker, seen: Seen, name: str) -> None:
    got = bounded(live, seen, name, answered(seen, 30))
    assert got.get("200", 0) <= 1, "only its own lease"
    account = live.broker.costs.of_user(ATTACKER)
    assert account.left_s < 0.9
    assert seen.bodies < 64 * 262_144 + seen.answers.count(ATTACKER) * 262_144, (
        "more than are served at a time wait unread"
    )


# -- IOPub -------------------------------------------------------------------------------------------------------------------


def test_long_messages_of_many_kernels_are_neither_verified_nor_kept(live: LiveBroker, seen: Seen) -> None:
    def listens() -> bool:
        return sum(kernel.iopub is not None for kernel in list(live.broker.kernels.values())) >= 20

    got = bounded(live, seen, "iopub:1000000", listens)
    assert "sha512" in got, "an expensive digest is refused"
    assert max(seen.frames) <= _LONGEST_FRAME
    assert seen.hashed < 60 * _LONGEST_STATUS, "the broker's own questions"


def test_messages_that_are_short_enough_are_charged_to_the_user_of_all_the_kernels(
    live: LiveBroker, seen: Seen
) -> None:
    account = live.broker.costs.of_user(ATTACKER)
    bounded(live, seen, "iopub:60000", lambda: account.left_s < 0)
    assert account.left_s < 0.5


# -- questions ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["capacity:400", "refused:400", "pipelined:50", "heads:200", "connects:100", "gates:50"]
)
def test_floods_of_questions_cost_another_user_a_few_answers(live: LiveBroker, seen: Seen, name: str) -> None:
    bounded(live, seen, name, lambda: live.server.connections()[0] >= 32)
    assert all("capacity" not in one and "scan" not in one for one in seen.shared)


def test_questions_about_others_share_a_scan_and_take_no_thread_from_swaps(live: LiveBroker, seen: Seen) -> None:
    begun_s = time.monotonic()
    bounded(live, seen, "others:100", answered(seen, 100))
    assert seen.most_scanning == 1
    assert seen.scans < 10 + 2 * (time.monotonic() - begun_s), "a pass each second, not for each question"
    assert all("scan" not in one and "_read" not in one for one in seen.shared)


def test_leases_that_come_and_go_leave_no_rows(live: LiveBroker, seen: Seen) -> None:
    got = bounded(live, seen, "ledger:2", answered(seen, 100))
    assert got["leases"] > 20

    async def rows() -> int:
        await live.broker.writer.flushed()
        counts = [live.disk._read(f"SELECT count(*) AS n FROM {table}")[0]["n"] for table in ("leases", "story")]  # noqa: S608
        return sum(counts)

    until(lambda: live.on_loop(rows) <= 64, "what the attack left half way has ended")
