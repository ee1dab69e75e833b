"""What is written comes back, and what cannot be true is refused."""

import json
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.core.model import LeaseState
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord, RecordError
from fractional_gpu.protocol.status import StoryLine, UsagePoint
from tests.support.records import a_record

MakeLease = Callable[..., LeaseRecord]


def test_leases_survive_a_restart_field_for_field(path: Path, make_lease: MakeLease) -> None:
    resident = make_lease("b", created_ms=2)
    bare = make_lease("c", created_ms=1, device_id=None, identity=None, connection="", ipykernel=False)
    with Ledger.open(path) as ledger:
        ledger.save_lease(resident)
        ledger.save_lease(bare)
    with Ledger.open(path) as ledger:
        assert ledger.live_leases() == [bare, resident]


def test_a_text_that_is_no_text_is_refused_and_the_rest_stands(ledger: Ledger, make_lease: MakeLease) -> None:
    lease = make_lease()
    with ledger.transaction():
        ledger.save_lease(lease)
        with pytest.raises(RecordError, match="surrogates not allowed"):
            ledger.record("a", 1, "suspend.refused", "limited by u\udcff")
        with pytest.raises(RecordError, match="surrogates not allowed"):
            ledger.save_lease(replace(lease, spec=replace(lease.spec, owner="u\udcff")))
    assert ledger.live_leases() == [lease]


def test_saving_again_replaces_every_field(ledger: Ledger, make_lease: MakeLease) -> None:
    ledger.save_lease(make_lease())
    changed = a_record(
        spec=replace(
            make_lease().spec, owner="bob", fraction_milli=500, reserve_mib=1, priority=9, gated=False, label=""
        ),
        state=LeaseState.SUSPENDED,
        generation=8,
        device_id="GPU-2",
        saved_mib=77,
        uid=1,
        kernel_id="k-2",
        token_sha256="cd" * 32,
        boot_id="boot-2",
        pid=5,
        start_time=6,
        connection="{}",
        language="julia",
        ipykernel=False,
        created_ms=7,
        suspends=8,
        resumes=9,
    )
    ledger.save_lease(changed)
    assert ledger.live_leases() == [changed]


def test_an_ended_lease_stays_ended_and_its_secrets_are_erased(
    ledger: Ledger, path: Path, make_lease: MakeLease
) -> None:
    ledger.save_lease(make_lease())
    ledger.end_lease("a", 5, "released")
    ledger.end_lease("a", 6, "expired")
    ledger.end_lease("never seen", 6, "expired")
    assert ledger.live_leases() == []
    with pytest.raises(RecordError, match="lease a has already ended"):
        ledger.save_lease(make_lease())
    with pytest.raises(RecordError, match="end_lease"):
        ledger.save_lease(make_lease("b", state=LeaseState.ENDED))
    ledger.close()
    with sqlite3.connect(path) as reader:
        ((*end, document),) = reader.execute("SELECT ended_ms, end_reason, document FROM leases").fetchall()
    reader.close()
    ended = json.loads(document)
    assert end == [5, "released"]
    assert (ended["connection"], ended["token_sha256"], ended["state"]) == ("", "", "ended")


def test_of_a_lease_that_never_had_a_process_only_a_count_by_user_and_hour_stays(
    ledger: Ledger, make_lease: MakeLease
) -> None:
    never = {"identity": None, "had_process": False, "state": LeaseState.UNATTACHED}
    hour_ms = 3_600_000
    for lease_id, uid, at_ms in (("a", 7, 5), ("b", 7, 6), ("c", 8, 7), ("d", 7, hour_ms)):
        ledger.save_lease(make_lease(lease_id, uid=uid, **never))
        ledger.record(lease_id, 1, "r", "s")
        ledger.add_point(lease_id, UsagePoint(at_ms=1, state="unattached", used_mib=0, saved_mib=0))
        for _ in range(2):
            ledger.end_lease(lease_id, at_ms, "released")
        assert (ledger.has_lease(lease_id), ledger.story(lease_id), ledger.points(lease_id)) == (False, [], [])
    rows = ledger._read("SELECT hour, uid, leases FROM unstarted ORDER BY hour, uid")
    assert [tuple(row) for row in rows] == [(0, 7, 2), (0, 8, 1), (1, 7, 1)]
    ledger.prune(hour_ms)
    assert [tuple(row) for row in ledger._read("SELECT hour, uid, leases FROM unstarted")] == [(1, 7, 1)]


@pytest.mark.parametrize("had", [{"had_process": False}, {"identity": None, "had_process": True}])
def test_a_lease_that_has_or_had_a_process_keeps_its_history(
    ledger: Ledger, make_lease: MakeLease, had: dict[str, object]
) -> None:
    ledger.save_lease(make_lease(**had))
    ledger.record("a", 1, "r", "s")
    ledger.end_lease("a", 5, "released")
    assert ledger.has_lease("a")
    assert [line.sentence for line in ledger.story("a")] == ["s"]
    assert ledger._read("SELECT * FROM unstarted") == []


def test_a_story_is_told_in_order_and_from_its_end(ledger: Ledger) -> None:
    for at_ms in (30, 10, 20):
        ledger.record("a", at_ms, f"r{at_ms}", f"It was {at_ms}.")
        ledger.record("b", at_ms, "other", "Another lease.")
    lines = [StoryLine(at_ms=at, reason=f"r{at}", sentence=f"It was {at}.") for at in (30, 10, 20)]
    assert ledger.story("a") == lines
    assert ledger.story("a", limit=2) == lines[1:]
    assert ledger.story("a", limit=0) == []
    assert ledger.story("a", limit=-1) == []
    assert ledger.story("nobody") == []


def test_pruning_forgets_what_is_over_and_nothing_else(ledger: Ledger, make_lease: MakeLease) -> None:
    for lease_id in ("live", "over", "over late"):
        ledger.save_lease(make_lease(lease_id))
        ledger.record(lease_id, 5, "r", "early")
        ledger.record(lease_id, 15, "r", "late")
    ledger.end_lease("over", 9, "released")
    ledger.end_lease("over late", 10, "released")
    ledger.prune(before_ms=10)
    assert [lease.spec.lease_id for lease in ledger.live_leases()] == ["live"]
    assert [line.sentence for line in ledger.story("live")] == ["late"]
    ended = ledger._read("SELECT lease_id FROM leases WHERE ended_ms IS NOT NULL ORDER BY lease_id")
    assert [row["lease_id"] for row in ended] == ["over late"]


def test_a_transaction_is_kept_whole_or_not_at_all(ledger: Ledger, make_lease: MakeLease) -> None:
    def half_of_it() -> None:
        with ledger.transaction():
            ledger.save_lease(make_lease("x"))
            with ledger.transaction():
                ledger.record("x", 1, "r", "s")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half_of_it()
    assert ledger.live_leases() == []
    assert ledger.story("x") == []
    with ledger.transaction():
        ledger.save_lease(make_lease("x"))
        ledger.record("x", 1, "r", "s")
    assert len(ledger.live_leases()) == len(ledger.story("x")) == 1


def test_another_thread_waits_for_the_end_of_a_transaction(ledger: Ledger) -> None:
    about_to_read, seen = threading.Event(), list[int]()

    def read() -> None:
        about_to_read.set()
        seen.append(len(ledger.story("a")))

    reader = threading.Thread(target=read)
    with ledger.transaction():
        ledger.record("a", 1, "r", "first")
        reader.start()
        assert about_to_read.wait(10)
        ledger.record("a", 2, "r", "second")
    reader.join(10)
    assert seen == [2]
