"""The audit log: it records every act of an administrator before the answer, no other user's, and no act happens that it cannot record."""

import json
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.broker.api import server
from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.persistence.audit import FILE_NAME, AuditedAction, AuditLog, finished_files
from fractional_gpu.broker.services import residency
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.config import load
from fractional_gpu.host.peers import PeerCredentials
from fractional_gpu.protocol.errors import BadRequestError, ConflictError, InternalBrokerError, NotFoundError
from fractional_gpu.protocol.messages import DrainRequest, EvictRequest, MoveRequest, PinRequest, ResizeRequest
from fractional_gpu.protocol.seats import SeatRequest
from tests.broker.live import LiveBroker, live_broker, started_for

ROOT = Peer(credentials=PeerCredentials(7, 0, 0), token=None, admin=True, acting_for="ada\nlovelace")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def acts(live: LiveBroker) -> list[tuple[str, str]]:
    """Return the log without plain queries."""
    entries = lines(live.service.audit.path)
    return [(one["act"], one["outcome"]) for one in entries if one["outcome"] != "asked"]


# -- acts --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[LiveBroker]:
    """A broker with an empty log."""
    with live_broker() as live:
        yield live


def test_every_act_of_an_administrator_is_recorded_with_both_users(
    fresh: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_IDLE_PATIENCE_S", 0.01)  # the process answers no request, so it counts as busy
    log = fresh.service.audit.path
    lease = fresh.lease()
    with started_for(lease.lease_id) as process, SeatClient(fresh.socket, acting_for="zoë") as client:
        fresh.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
        client.drain("0", DrainRequest(evict_busy=True))
        client.undrain("0")
        client.change_pool("default", {"idle_after": "2m"})
        client.pin(lease.lease_id, PinRequest(duration_ms=60_000))
        client.unpin(lease.lease_id)
        client.resize(lease.lease_id, ResizeRequest(fraction_milli=500))
        client.suspend(lease.lease_id)
        client.resume(lease.lease_id)
        seat = list(client.take_seat(SeatRequest(owner="bob", pool="default", fraction_milli=250)))[-1]
        client.release_seat(seat.seat_id)
        with pytest.raises(ConflictError):
            client.move(lease.lease_id, MoveRequest())
        with pytest.raises(BadRequestError):
            client.evict(lease.lease_id, EvictRequest())
        client.release(lease.lease_id)
        with pytest.raises(NotFoundError):
            client.drain("7", DrainRequest())
    entries = lines(log)
    done = [one for one in entries if one["outcome"] != "asked"]
    assert [(one["act"], one["outcome"]) for one in done] == [
        ("drain", "done"),
        ("undrain", "done"),
        ("pool.change", "done"),
        ("pin", "done"),
        ("unpin", "done"),
        ("resize", "done"),
        ("suspend", "done"),
        ("resume", "done"),
        ("seat.give", "done"),
        ("seat.end", "done"),
        ("move", "refused"),
        ("evict", "refused"),
        ("release", "done"),
        ("drain", "refused"),
    ]
    assert [one["id"] for one in entries if one["outcome"] == "asked"] == [one["id"] for one in done]
    assert {(one["uid"], one["user"], one["acting_for"], one["pid"]) for one in entries} == {
        (0, "root", "zoë", os.getpid())
    }
    now = datetime.now(UTC)
    assert all(now - timedelta(minutes=5) < datetime.fromisoformat(one["time"]) <= now for one in entries)
    by_act = {one["act"]: one for one in reversed(done)}
    assert (by_act["drain"]["object"], by_act["drain"]["parameters"]) == ("0", {"evict_busy": True})
    assert by_act["pool.change"]["parameters"] == {"keys": {"idle_after": "2m"}}
    assert by_act["pin"]["parameters"]["duration_ms"] == 60_000
    assert (by_act["pin"]["object"], by_act["pin"]["parameters"]["owner"]) == (lease.lease_id, "root")
    assert by_act["seat.give"]["object"] == "bob"
    assert (done[-1]["reason"], "'7' is not a device" in done[-1]["sentence"]) == ("unknown-device", True)
    text = log.read_text()
    assert seat.token
    assert seat.token not in text
    assert lease.token not in text
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_what_people_do_to_their_own_kernels_is_nobodys_business(fresh: LiveBroker) -> None:
    with BrokerClient(fresh.socket) as client:
        for token in (None, "its own"):
            lease = fresh.lease()
            client.token = token and lease.token
            client.resize(lease.lease_id, ResizeRequest(fraction_milli=500))
            client.release(lease.lease_id)
    fresh.call("POST", "/v1/pools/default", {"keys": {}})
    assert acts(fresh) == []


def test_leases_of_another_user_or_of_a_seat_belong_to_others(
    fresh: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = fresh.lease()
    with SeatClient(fresh.socket) as client:
        seat = list(client.take_seat(SeatRequest(owner="bob", pool="default", fraction_milli=250)))[-1]
        assert seat.token is not None
        drawn = fresh.call("POST", "/v1/leases", {"fraction_milli": 250, "seat": seat.seat_id}, token=seat.token)
        assert drawn.status == 200, drawn
        client.resize(drawn.body["lease_id"], ResizeRequest(memory_mib=200))
    monkeypatch.setattr(server, "peer_credentials", lambda _: PeerCredentials(1, 65_534, 65_534))
    monkeypatch.setattr(server, "is_admin", lambda *_: True)
    with SeatClient(fresh.socket) as client:
        client.resize(lease.lease_id, ResizeRequest(memory_mib=200))
    assert [act for act in acts(fresh) if act[0] == "resize"] == [("resize", "done")] * 2


# -- a log that cannot be written ------------------------------------------------------------------------------------------


def test_what_cannot_be_written_down_is_not_done(fresh: LiveBroker) -> None:
    fresh.service.audit.path.mkdir()
    answer = fresh.call("POST", "/v1/devices/0/drain", {})
    assert (answer.status, answer.error["reason"]) == (500, "audit-log")
    assert "so the action 'drain' was not carried out" in answer.error["message"]
    assert "Is a directory" in answer.error["message"]
    assert not fresh.call("GET", "/v1/status").body["devices"][0]["draining"]
    fresh.service.audit.path.rmdir()
    assert fresh.call("POST", "/v1/devices/0/drain", {}).body["draining"]
    assert acts(fresh) == [("drain", "done")]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AuditLog]:
    log = AuditLog(load(None, {"audit_files": 3}), tmp_path)
    yield log
    log.close()


async def write(log: AuditLog, **parameters: object) -> None:
    async with log.act("drain", "GPU-0", ROOT, parameters):
        pass


async def test_a_disk_that_fills_up_after_the_act_is_said_so(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InternalBrokerError, match=r"so the outcome of 'drain' \(done\) is not recorded"):
        async with log.act("drain", "GPU-0", ROOT, {}):
            monkeypatch.setattr(os, "fsync", full)
    monkeypatch.undo()
    assert [one["outcome"] for one in lines(log.path)] == ["asked"], "what a full disk cut short is taken back"
    await write(log)
    assert [one["outcome"] for one in lines(log.path)] == ["asked", "asked", "done"]


async def test_a_line_that_a_crash_cut_short_spoils_no_other(log: AuditLog) -> None:
    log.path.write_bytes(b'{"time":"2026-')
    await write(log)
    torn, *whole = log.path.read_text().splitlines()
    assert torn == '{"time":"2026-'
    assert [json.loads(line)["outcome"] for line in whole] == ["asked", "done"]


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
async def test_the_log_is_a_file_of_its_own(log: AuditLog, kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if kind == "link":
        log.path.symlink_to(victim)
    elif kind == "hard link":
        log.path.hardlink_to(victim)
    else:
        os.mkfifo(log.path)
    before = victim.stat()
    with pytest.raises(InternalBrokerError, match="the action 'drain' was not carried out"):
        await write(log)
    assert victim.read_text() == "precious"
    assert victim.stat().st_mode == before.st_mode


# -- lines -------------------------------------------------------------------------------------------------------------------


async def test_nothing_that_is_said_ends_a_line_or_steers_a_terminal(log: AuditLog) -> None:
    await write(log, key='\n{"time":"forged"}\r\x1b[2J\u2028\ud800')
    text = log.path.read_bytes()
    assert text.count(b"\n") == 2
    assert text.isascii()
    assert all(32 <= byte < 127 or byte == 10 for byte in text)
    assert [one["acting_for"] for one in lines(log.path)] == ["ada\nlovelace"] * 2


# -- files -------------------------------------------------------------------------------------------------------------------


async def test_what_is_older_than_what_is_kept_is_removed(tmp_path: Path) -> None:
    log = AuditLog(load(None, {"audit_keep": "4h"}), tmp_path)
    begun = AuditedAction(what="old", target="", peer=ROOT, parameters={}).line("done").decode()
    stale = json.dumps({**json.loads(begun), "time": (datetime.now(UTC) - timedelta(minutes=61)).isoformat()})
    log.path.write_text(stale + "\n")
    await write(log)
    (finished,) = finished_files(log.path)
    assert "old" in finished.read_text()
    await log.prune()
    assert finished.exists(), "its last line is not four hours old"
    long_ago = datetime.now(UTC).timestamp() - 4 * 3600 - 60
    os.utime(finished, (long_ago, long_ago))
    unrelated = tmp_path / f"{FILE_NAME}.backup"
    unrelated.write_text("kept")
    os.utime(unrelated, (long_ago, long_ago))
    await log.prune()
    assert not finished.exists()
    assert unrelated.exists()
    assert log.path.exists()
    log.close()


async def test_a_broker_says_at_its_start_that_the_log_cannot_be_written(
    log: AuditLog, caplog: pytest.LogCaptureFixture
) -> None:
    await log.check()
    assert caplog.records == []
    assert log.path.read_bytes() == b""
    log.path.unlink()
    log.path.mkdir()
    await log.check()
    assert "administrators' actions are refused until it is writable" in caplog.text
