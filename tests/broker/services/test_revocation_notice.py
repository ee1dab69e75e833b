"""A notice that the host goes away drains all its devices; withdrawing the notice gives them back."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.broker.clock import wall_ms
from fractional_gpu.broker.services import revocation_notice
from fractional_gpu.broker.services.revocation_notice import (
    Notice,
    RevocationNotice,
    UnreadableNoticeError,
    parse_notice,
    read_notice,
)
from fractional_gpu.ledger.records import LedgerError
from tests.broker.live import LiveBroker, live_broker

pytestmark = pytest.mark.promise("revocation")

AWS = "/latest/meta-data/spot/instance-action"
GOOGLE = "/computeMetadata/v1/instance/preempted"
MOMENT_MS = int(datetime(2026, 9, 18, 8, 22, tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ("", Notice()),
        ("TRUE\n", Notice()),
        ("FALSE\n", None),
        ('{"action": "terminate", "time": "2026-09-18T08:22:00Z"}', Notice(MOMENT_MS)),
        ('{"action": "terminate", "time": "soon"}', Notice()),
        ("[1]", Notice()),
        ('{"Events": []}', None),
        ('{"Events": [{"EventType": "Freeze", "NotBefore": "Fri, 18 Sep 2026 08:22:00 GMT"}]}', None),
        ('{"Events": [{"EventType": "Preempt", "NotBefore": "Fri, 18 Sep 2026 08:22:00 GMT"}]}', Notice(MOMENT_MS)),
        ('{"Events": [{"EventType": "Preempt", "NotBefore": ""}]}', Notice()),
        ('{"action": "terminate", "time": "1 Jan 1 00:00:00 +99999999999999"}', Notice()),
        ('{"action": "terminate", "time": "99999999999999 Jan 1 00:00:00"}', Notice()),
        ("[" * 65_536, Notice()),
    ],
)
def test_a_notice_is_read_as_clouds_write_it(text: str, notice: Notice | None) -> None:
    assert parse_notice(text) == notice


# -- metadata services -------------------------------------------------------------------------------------------------


@contextmanager
def metadata(answer: Callable[[str, str, Mapping[str, str]], tuple[int, str]]) -> Iterator[str]:
    """Serve on a loopback address, and yield the root URL."""

    class Service(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            status, text = answer(self.command, self.path, self.headers)  # type: ignore[arg-type]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _reply  # noqa: N815 - the names of the standard library

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_service_that_demands_a_token_as_aws_does_is_given_one() -> None:
    texts: dict[str, str] = {}

    def aws(method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, "secret") if headers.get("X-aws-ec2-metadata-token-ttl-seconds") else (400, "")
        if headers.get("X-aws-ec2-metadata-token") != "secret":
            return 401, ""
        return (200, texts[path]) if path in texts else (404, "")

    with metadata(aws) as root:
        assert read_notice(root + AWS) is None
        texts[AWS] = '{"action": "terminate", "time": "2026-09-18T08:22:00Z"}'
        assert read_notice(root + AWS) == Notice(MOMENT_MS)


@pytest.mark.parametrize("status", [302, 401, 500])
def test_a_service_that_fails_says_neither_yes_nor_no(status: int) -> None:
    with metadata(lambda *_: (status, "")) as root, pytest.raises(UnreadableNoticeError, match=f"status {status}"):
        read_notice(root + GOOGLE)


def test_a_service_that_is_not_there_says_neither_yes_nor_no() -> None:
    with metadata(lambda *_: (200, "")) as root:
        pass
    with pytest.raises(UnreadableNoticeError, match="is not responding"):
        read_notice(root + AWS)


# -- what follows ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[LiveBroker]:
    """A broker with two devices."""
    with live_broker("2x1GiB") as live:
        yield live


def _devices(live: LiveBroker) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = live.call("GET", "/v1/status").body["devices"]
    return devices


def _look(live: LiveBroker, notice: RevocationNotice) -> list[dict[str, Any]]:
    live.on_loop(notice.look)
    return _devices(live)


def test_all_devices_are_drained_by_the_deadline_of_a_notice_and_given_back_as_they_were(
    two: LiveBroker, tmp_path: Path
) -> None:
    two.call("POST", "/v1/devices/1/drain", {"evict_busy": True})
    lease = two.lease()
    path = tmp_path / "revoked"
    notice = RevocationNotice(two.broker, path, 30_000, drains=True)
    assert [one.get("draining", False) for one in _look(two, notice)] == [False, True]
    at = datetime.fromtimestamp(wall_ms() / 1000 + 90, UTC)
    path.write_text(json.dumps({"time": at.isoformat()}))
    devices = _look(two, notice)
    assert all(one["draining"] and 0 < one["goes_away_in_ms"] <= 90_000 for one in devices)
    assert [one["goes_away_in_ms"] > 60_000 for one in devices] == [True, True]
    story = two.call("GET", f"/v1/leases/{lease.lease_id}/story", token=lease.token).body["lines"]
    assert "Save your results, models and tables now, to a disk that outlives the host" in story[-1]["sentence"]
    path.unlink()
    later = RevocationNotice(two.broker, path, 30_000, drains=True)  # as in a broker that starts meanwhile
    devices = _look(two, later)
    assert [one.get("draining", False) for one in devices] == [False, True]
    assert [one.get("goes_away_in_ms") for one in devices] == [None, None]
    assert two.broker.writer.ledger.drained() == {devices[1]["device_id"]: True}


def test_a_notice_without_a_time_has_the_deadline_that_is_configured_and_keeps_it(
    two: LiveBroker, tmp_path: Path
) -> None:
    path = tmp_path / "revoked"
    path.touch()
    notice = RevocationNotice(two.broker, path, 600_000, drains=True)
    _look(two, notice)
    deadlines = two.broker.writer.ledger.drain_deadlines()
    assert len(deadlines) == 2
    _look(two, notice)
    assert two.broker.writer.ledger.drain_deadlines() == deadlines


def test_a_source_that_cannot_be_read_withdraws_nothing(
    two: LiveBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Notice | None] = [Notice()]

    def read(_: Path | str) -> Notice | None:
        if not answers:
            raise UnreadableNoticeError("it is not responding")
        return answers.pop()

    monkeypatch.setattr(revocation_notice, "read_notice", read)
    notice = RevocationNotice(two.broker, tmp_path, 600_000, drains=True)
    _look(two, notice)
    assert all(one["draining"] for one in _look(two, notice))
    answers.append(None)
    assert not any(one.get("draining") for one in _look(two, notice))


def test_by_itself_a_notice_only_tells_so_that_kernels_can_still_save(two: LiveBroker, tmp_path: Path) -> None:
    lease, path = two.lease(), tmp_path / "revoked"
    notice = RevocationNotice(two.broker, path, 600_000, drains=False)

    def told() -> list[str]:
        lines = two.call("GET", f"/v1/leases/{lease.lease_id}/story", token=lease.token).body["lines"]
        return [line["reason"] for line in lines if line["reason"].startswith("revocation.")]

    assert told() == []
    path.touch()
    for _ in range(2):
        assert not any(one.get("draining") for one in _look(two, notice))
    assert told() == ["revocation.host"]
    path.unlink()
    for _ in range(2):
        _look(two, notice)
    assert told() == ["revocation.host", "revocation.host-stays"]


def test_a_full_disk_delays_no_notice_and_the_rest_is_done_later(two: LiveBroker, tmp_path: Path) -> None:
    lease, path = two.lease(), tmp_path / "revoked"
    notice = RevocationNotice(two.broker, path, 600_000, drains=True)
    path.touch()
    two.disk.full = True
    try:
        with pytest.raises(LedgerError):
            _look(two, notice)
    finally:
        two.disk.full = False
    assert all(one["draining"] for one in _look(two, notice))
    path.unlink()
    assert not any(one.get("draining") for one in _look(two, notice))
    lines = two.call("GET", f"/v1/leases/{lease.lease_id}/story", token=lease.token).body["lines"]
    assert [line["reason"] for line in lines if line["reason"].startswith("revocation.host")][
        -1
    ] == "revocation.host-stays"
