"""What users may change about their leases and administrators about devices; what is refused, and with which message."""

import grp
import os
import pwd
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fractional_gpu.broker.api import server
from fractional_gpu.broker.clock import wall_ms
from fractional_gpu.broker.kernels import request_validation
from fractional_gpu.broker.kernels.request_validation import Peer, lease_spec
from fractional_gpu.broker.recovery.recovery import kernel_of
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.config import ConfigError, load
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import DeviceSeen, PoolConfigured
from fractional_gpu.core.model import DeviceSpec, Limits, PoolSpec
from fractional_gpu.host.peers import PeerCredentials
from fractional_gpu.protocol.messages import LeaseRequest
from tests.broker.live import LiveBroker, started_for


def device_of(live: LiveBroker) -> dict[str, Any]:
    (device,) = live.call("GET", "/v1/status").body["devices"]
    assert isinstance(device, dict)
    return device


# -- telling -----------------------------------------------------------------------------------------------------------------


def pinned_ms(status: dict[str, Any]) -> int:
    return max(0, int(status["lease"]["pinned_until_ms"]) - int(status["now_ms"]))


def size(status: dict[str, Any]) -> tuple[int, int]:
    return status["lease"]["spec"]["fraction_milli"], status["lease"]["spec"]["reserve_mib"]


def test_a_story_is_read_back_oldest_first(live: LiveBroker) -> None:
    lease = live.lease()
    with started_for(lease.lease_id) as process:
        live.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
        live.call("POST", f"/v1/leases/{lease.lease_id}/detach", {}, token=lease.token)
    told = live.call("GET", f"/v1/leases/{lease.lease_id}/story").body
    assert (told["lease_id"], told["omitted"]) == (lease.lease_id, 0)
    times = [line["at_ms"] for line in told["lines"]]
    assert times == sorted(times)
    assert times
    assert all(line["reason"] and line["sentence"] for line in told["lines"])


def test_a_history_has_a_point_for_each_state(live: LiveBroker) -> None:
    lease = live.lease()
    with started_for(lease.lease_id) as process:
        live.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
    with BrokerClient(live.socket, token=lease.token) as client:
        history = client.history(lease.lease_id)
    assert (history.lease_id, history.cap_mib) == (lease.lease_id, 256)
    states = [point.state for point in history.points]
    assert states[0] == "unattached"
    assert "unarmed" in states
    assert all(one.at_ms <= other.at_ms for one, other in zip(history.points, history.points[1:], strict=False))


def test_neighbours_have_names_only_for_their_own_user(live: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = live.lease(gated=False, label="mine.ipynb", wait_ms=1000)
    also = live.lease(gated=False, label="also.ipynb", wait_ms=1000)
    try:
        monkeypatch.setattr(request_validation, "account_name", lambda _uid: "somebody else")
        theirs = live.lease(gated=False, label="secret.ipynb", wait_ms=1000)
        try:
            told = live.call("GET", f"/v1/leases/{mine.lease_id}").body["neighbours"]
        finally:
            live.call("DELETE", f"/v1/leases/{theirs.lease_id}")
    finally:
        for lease in (mine, also):
            live.call("DELETE", f"/v1/leases/{lease.lease_id}")
    assert sorted((one["label"], one["reserved_mib"]) for one in told) == [("", 256), ("also.ipynb", 256)]


@pytest.mark.parametrize(
    ("note", "says"),
    [("x" * 201, "length <= 200"), ("a\x1b[31m", "the note contains U+001B"), ("a\u202eb", "the note contains U+202E")],
)
def test_a_note_is_kept_with_the_lease_unless_it_is_too_long_or_controls_a_terminal(
    live: LiveBroker, note: str, says: str
) -> None:
    lease = live.lease()
    target = f"/v1/leases/{lease.lease_id}/note"
    assert live.call("POST", target, {"note": "Ada's"}).body["note"] == "Ada's"
    refused = live.call("POST", target, {"note": note})
    assert (refused.status, says in refused.error["message"]) == (400, True)
    (record,) = [one for one in live.broker.writer.ledger.live_leases() if one.spec.lease_id == lease.lease_id]
    assert kernel_of(record).facts.note == "Ada's", "the next broker knows it, too"
    assert live.call("POST", target, {"note": ""}).body["note"] == ""


# -- signs of a coming cell --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"sign": "rhythm"}, "sign is 'rhythm'; expected one of: completion, focus, hover, "),
        ({"sign": "x" * 300}, "sign is 'xxx"),
        ({"within_ms": 0}, "within_ms is 0; expected 1 to 600000"),
        ({"within_ms": 10**12}, "within_ms is 1000000000000; expected 1 to 600000"),
        ({"confidence_milli": 1001}, "confidence_milli is 1001; expected 1 to 1000"),
        ({"code": "print(1)"}, "code"),
    ],
)
def test_a_sign_is_one_of_a_few_words_and_carries_nothing_else(
    live: LiveBroker, body: dict[str, object], says: str
) -> None:
    lease = live.lease()
    answer = live.call("POST", f"/v1/leases/{lease.lease_id}/expect", body)
    assert answer.status == 400, answer
    assert says in str(answer.body)


# -- pins --------------------------------------------------------------------------------------------------------------------


def test_a_pin_lasts_as_long_as_was_said_and_is_on_the_disk_when_that_is_answered(live: LiveBroker) -> None:
    lease = live.lease()
    target = f"/v1/leases/{lease.lease_id}"
    with started_for(lease.lease_id) as process:
        live.call("POST", f"{target}/attach", process, token=lease.token)
        answer = live.call("POST", f"{target}/pin", {"duration_ms": 3_600_000})
        assert answer.status == 200, answer
        assert 3_500_000 < pinned_ms(answer.body) <= 3_600_000
        assert saved_pin_ms(live, lease.lease_id) > 3_500_000
        again = live.call("POST", f"{target}/pin", {"duration_ms": 600_000})
        assert 500_000 < pinned_ms(again.body) <= 600_000, "a new pin replaces the one there was"
        assert pinned_ms(live.call("POST", f"{target}/unpin", {}).body) == 0
        assert saved_pin_ms(live, lease.lease_id) < 0
        assert live.call("POST", f"{target}/unpin", {}).status == 200


def saved_pin_ms(live: LiveBroker, lease_id: str) -> int:
    """Return how long the lease stays pinned according to the ledger."""
    (record,) = [one for one in live.broker.writer.ledger.live_leases() if one.spec.lease_id == lease_id]
    return record.pinned_until_ms - wall_ms()


# -- sizes -------------------------------------------------------------------------------------------------------------------


def test_a_lease_that_is_not_on_a_device_has_its_new_size_at_once(live: LiveBroker) -> None:
    lease = live.lease()
    target = f"/v1/leases/{lease.lease_id}"
    bigger = live.call("POST", f"{target}/resize", {"fraction_milli": 500}).body
    assert size(bigger) == (500, 512)
    more = live.call("POST", f"{target}/resize", {"memory_mib": 600}).body
    assert size(more) == (500, 600)
    same = live.call("POST", f"{target}/resize", {}).body
    assert size(same) == (500, 600)
    (record,) = [one for one in live.broker.writer.ledger.live_leases() if one.spec.lease_id == lease.lease_id]
    assert (record.spec.fraction_milli, record.spec.reserve_mib) == (500, 600), "on the disk before it was answered"


def test_a_burst_is_on_the_disk_with_the_size_before_it_until_it_is_over(live: LiveBroker) -> None:
    lease = live.lease()

    def resize(fraction_milli: int, *, burst: bool) -> tuple[int, tuple[int, int] | None]:
        """Return the size and the user's own size in the ledger."""
        size = {"fraction_milli": fraction_milli, "burst": burst}
        assert live.call("POST", f"/v1/leases/{lease.lease_id}/resize", size).status == 200
        (record,) = [one for one in live.broker.writer.ledger.live_leases() if one.spec.lease_id == lease.lease_id]
        own = record.own_size
        return record.spec.fraction_milli, None if own is None else (own.fraction_milli, own.reserve_mib)

    assert resize(500, burst=True) == (500, (250, 256))
    assert resize(750, burst=True) == (750, (250, 256))
    assert resize(250, burst=False) == (250, None)
    assert resize(500, burst=True) == (500, (250, 256))
    assert resize(500, burst=False) == (500, None), "the size of the burst was asked for, for good"


# -- devices -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def drained(live: LiveBroker) -> Iterator[dict[str, Any]]:
    """The device, which drains during the test."""
    answer = live.call("POST", "/v1/devices/0/drain", {"evict_busy": False})
    assert answer.status == 200, answer
    yield answer.body
    live.call("POST", "/v1/devices/0/undrain", {})


def test_a_device_is_emptied_until_it_is_said_otherwise(live: LiveBroker, drained: dict[str, Any]) -> None:
    assert drained["draining"]
    assert device_of(live)["draining"]
    ledger = live.broker.writer.ledger
    assert ledger.drained() == {drained["device_id"]: False}
    live.call("POST", f"/v1/devices/{drained['device_id']}/drain", {"evict_busy": True})
    assert ledger.drained() == {drained["device_id"]: True}
    answer = live.call("POST", f"/v1/devices/{drained['device_id'][:9]}/undrain", {})
    assert (answer.status, answer.body["draining"]) == (200, False)
    assert ledger.drained() == {}
    assert not device_of(live)["draining"]


@pytest.mark.parametrize(("device", "says"), [("7", "'7' is not a device of this broker; devices: 0 "), ("", "")])
def test_a_device_that_is_not_there_is_named_with_those_that_are(live: LiveBroker, device: str, says: str) -> None:
    answer = live.call("POST", f"/v1/devices/{device}/drain", {})
    assert answer.status == 404
    assert says in answer.error["message"]


# -- wishes ------------------------------------------------------------------------------------------------------------------


def arbiter_with(**policy: Any) -> Arbiter:  # noqa: ANN401 - PoolSpec's fields
    arbiter = Arbiter()
    for number in range(4):
        device = DeviceSpec(device_id=f"d{number}", name="G", memory_mib=1000)
        arbiter.handle(DeviceSeen(at_ms=0, device=device))
    devices = tuple(f"d{number}" for number in range(4))
    arbiter.handle(PoolConfigured(at_ms=0, pool=PoolSpec(name="default", devices=devices, **policy)))
    return arbiter


def peer(*, admin: bool = False) -> Peer:
    return Peer(credentials=PeerCredentials(1, os.getuid(), os.getgid()), token=None, admin=admin)


def test_an_administrator_may_have_any_priority_and_others_up_to_the_pools() -> None:
    assert lease_spec(arbiter_with(), peer(admin=True), LeaseRequest(fraction_milli=250, priority=900)).priority == 900
    modest = LeaseRequest(fraction_milli=250, priority=5)
    assert lease_spec(arbiter_with(max_priority=5), peer(), modest).priority == 5


def test_a_user_counts_for_the_first_group_with_limits_that_they_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = grp.getgrgid(os.getgid()).gr_name
    limits = (("nobody-is-in-this-group", Limits(leases=1)), (mine, Limits(leases=2)))
    request = LeaseRequest(fraction_milli=250)
    assert lease_spec(arbiter_with(group_limits=limits), peer(), request).group == mine
    assert lease_spec(arbiter_with(group_limits=limits[:1]), peer(), request).group == ""
    assert lease_spec(arbiter_with(), peer(), request).group == ""

    def unknown(_uid: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert lease_spec(arbiter_with(group_limits=limits), peer(), request).group == ""


AskInGroup = Callable[[str | None], int]


@pytest.fixture
def ask_in_group(live: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> AskInGroup:
    """Ask as another user with our groups, one of which is the administrators'; return the status."""
    groups = {"nogroup": -2, "this one": os.getgid(), None: None}

    def ask(name: str | None) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(server, "peer_credentials", lambda _: PeerCredentials(1, 65_534, 65_534))
            patch.setattr(live.server, "_admin_gid", groups[name])
            return live.call("POST", "/v1/devices/0/undrain", {}).status

    return ask


def test_a_member_of_the_administrators_group_is_an_administrator(ask_in_group: AskInGroup) -> None:
    assert ask_in_group("nogroup") == 403
    assert ask_in_group(None) == 403
    assert ask_in_group("this one") == 200


def test_an_administrators_group_that_the_host_lacks_is_an_error_that_names_it() -> None:
    settings = load(None, {"admin_group": "no-such-group"})
    with pytest.raises(ConfigError, match=r"c\.GPUBroker\.admin_group = 'no-such-group': this host has no such group"):
        settings.admin_gid()
    assert load().admin_gid() is None
    mine = grp.getgrgid(os.getgid()).gr_name
    assert load(None, {"admin_group": mine}).admin_gid() == os.getgid()
