"""Only a lease's owner controls it, and only a process started for it can hold it."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord, LedgerError
from tests.broker.live import BECOME_NOBODY, Answer, LiveBroker, attach_fields, live_broker, started_for
from tests.support.callers import caller

# -- whose lease -------------------------------------------------------------------------------------------------------------


def test_an_administrator_sees_another_users_lease_and_its_owner_sees_only_that(
    live: LiveBroker,
) -> None:
    live.lease()
    with caller(live.socket, first=BECOME_NOBODY) as nobody:
        _, theirs = nobody.call("POST", "/v1/leases", body={"fraction_milli": 250})
        _, status = nobody.call("GET", "/v1/status")
    assert live.call("GET", f"/v1/leases/{theirs['lease_id']}").body["lease"]["spec"]["owner"] == "nobody"
    assert [one["lease"]["spec"]["lease_id"] for one in status["leases"]] == [theirs["lease_id"]]


@pytest.mark.parametrize("token", ["guess", "x" * 4000, "\xe9"])
def test_a_token_that_no_lease_has_is_refused(live: LiveBroker, token: str) -> None:
    refused = live.call("POST", f"/v1/leases/{live.lease().lease_id}/detach", {}, token=token)
    assert (refused.status, refused.error["reason"]) == (401, "foreign-token")


@pytest.mark.parametrize("header", ["guess", "Basic Z3Vlc3M=", "Bearer", "Bearer ", ""])
def test_an_authorization_of_another_form_is_explained(live: LiveBroker, header: str) -> None:
    answer = live.call("GET", f"/v1/leases/{live.lease().lease_id}", Authorization=header)
    assert (answer.status, answer.error["reason"]) == (401, "unauthorized")
    assert "Bearer TOKEN" in answer.error["message"]


def test_who_asks_for_fresh_figures_is_answered_after_a_sample(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = live.lease()
    samples: list[str] = []

    async def sample() -> None:
        samples.append(reply.lease_id)

    monkeypatch.setattr(live.service, "refresh", sample)
    with BrokerClient(live.socket, token=reply.token) as client:
        client.lease(reply.lease_id)
        assert not samples
        assert client.lease(reply.lease_id, fresh=True).lease_id == reply.lease_id
        assert len(samples) == 1
        client.status()
        assert client.status(fresh=True).leases
        assert len(samples) == 2


def test_a_second_release_is_no_error_and_what_is_over_is_not_found(live: LiveBroker) -> None:
    lease = live.lease()
    target = f"/v1/leases/{lease.lease_id}"
    assert [live.call("DELETE", target, token=lease.token).body for _ in range(3)] == [{"ok": True}] * 3
    answer = live.call("POST", f"{target}/acquire", {}, token=lease.token)
    assert (answer.status, answer.error["reason"]) == (404, "unknown-lease")


# -- which process -----------------------------------------------------------------------------------------------------------


def attach(live: LiveBroker, lease_id: str, token: str, fields: dict[str, Any]) -> Answer:
    return live.call("POST", f"/v1/leases/{lease_id}/attach", fields, token=token)


def test_the_process_that_was_started_for_the_lease_stands_behind_it(live: LiveBroker) -> None:
    lease = live.lease()
    with started_for(lease.lease_id) as fields:
        for _ in range(2):  # repeating it changes nothing
            answer = attach(live, lease.lease_id, lease.token, fields)
            assert (answer.status, answer.body["lease"]["state"], answer.body["pid"]) == (200, "unarmed", fields["pid"])
            assert answer.body["busy"] is True, "the broker has not heard its messages yet"


def test_a_process_without_a_lease_is_refused(live: LiveBroker) -> None:
    lease = live.lease()
    answer = attach(live, lease.lease_id, lease.token, attach_fields(os.getpid()))
    assert (answer.status, answer.error["reason"]) == (403, "wrong-lease")


def test_a_process_of_another_user_is_refused(live: LiveBroker) -> None:
    lease = live.lease()
    if os.geteuid() == 0:
        with started_for(lease.lease_id, first=BECOME_NOBODY) as fields:
            answer = attach(live, lease.lease_id, lease.token, fields)
        assert answer.error["reason"] == "wrong-uid"
        assert str(fields["pid"]) in answer.error["message"]
    else:
        answer = attach(live, lease.lease_id, lease.token, attach_fields(1))
        assert answer.error["reason"] == "no-permission"
    assert answer.status == 403


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"start_time": 1}, "is not the process that the request describes (start time differs)"),
        ({"boot_id": "yesterday"}, "is not the process that the request describes"),
        ({"pid": 2**22 + 1}, "cannot hold a lease: no process has the id"),
        ({"pid": 2**62}, "cannot hold a lease"),
        ({"pid": 0}, "process ids are positive"),
        ({"pid": -1}, "process ids are positive"),
        ({"pid": "1"}, "Expected `int`, got `str` - at `$.pid`"),
        ({"connection": []}, "Expected `object`, got `array` - at `$.connection`"),
        ({"connection": {}}, "connection field iopub_port is None; expected a port from 1 to 65535"),
        (
            {"connection": {"ip": "10.0.0.1", "iopub_port": 1, "shell_port": 1}},
            "connection field ip is '10.0.0.1'; expected a loopback",
        ),
        ({"connection": {"junk": [{}], "ip": {}}}, "connection field ip is {}; expected a loopback"),
    ],
    ids=str,
)
def test_a_process_that_is_not_as_stated_is_refused(live: LiveBroker, change: dict[str, object], says: str) -> None:
    lease = live.lease()
    with started_for(lease.lease_id) as fields:
        answer = attach(live, lease.lease_id, lease.token, {**fields, **change})
    assert answer.status == 400
    assert says in answer.error["message"]
    assert live.state(lease.lease_id) == "unattached"


def test_a_process_that_has_ended_is_refused(live: LiveBroker) -> None:
    lease = live.lease()
    with started_for(lease.lease_id) as fields:
        pass
    answer = attach(live, lease.lease_id, lease.token, fields)
    assert answer.error["reason"] == "no-process"


def test_a_lease_that_cannot_be_written_down_is_not_given(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_ledger: Ledger, _record: LeaseRecord) -> None:
        raise LedgerError("the ledger cannot be used: the disk is full; free some room")

    before = live.call("GET", "/v1/status").body["leases"]
    monkeypatch.setattr(Ledger, "save_lease", full)
    answer = live.call("POST", "/v1/leases", {"fraction_milli": 250})
    monkeypatch.undo()
    assert (answer.status, answer.error["reason"]) == (500, "ledger")
    assert answer.error["message"] == "the ledger cannot be used: the disk is full; free some room"
    assert "POST /v1/leases failed" in caplog.text
    live.on_loop(live.broker.writer.flushed)  # other leases were written, too
    caplog.clear()  # this was meant to fail
    after = live.call("GET", "/v1/status").body["leases"]
    assert [one["lease"] for one in after] == [one["lease"] for one in before]


# -- states in which a thing makes no sense ------------------------------------------------------------------------------------


def test_a_lease_without_a_process_has_nothing_to_resume_or_suspend(live: LiveBroker) -> None:
    lease = live.lease()
    resume = live.call("POST", f"/v1/leases/{lease.lease_id}/resume", {})
    assert (resume.status, resume.error["reason"]) == (409, "no-process")
    suspend = live.call("POST", f"/v1/leases/{lease.lease_id}/suspend", {})
    assert (suspend.status, suspend.error["code"]) == (409, "conflict")


def test_no_room_now_for_a_kernel_that_must_have_it_says_who_is_in_the_way(live: LiveBroker) -> None:
    first = live.lease(fraction_milli=1000, gated=False)
    wish = {"fraction_milli": 1000, "gated": False, "wait_ms": 1}
    answer = live.call("POST", "/v1/leases", wish)
    assert (answer.status, answer.error["code"]) == (409, "no-room")
    assert "1 ms" in answer.error["message"]
    live.call("DELETE", f"/v1/leases/{first.lease_id}")
    again = live.lease(fraction_milli=1000, gated=False, wait_ms=-5)
    assert again.device_id is not None
    live.call("DELETE", f"/v1/leases/{again.lease_id}")


def test_a_class_that_starts_in_the_same_second_waits_for_its_first_kernels_and_is_admitted() -> None:
    """Thirty kernels of one user, of which ten may be starting at a time."""
    with live_broker(pools={"default": {"unattached_leases": 10}}) as small, ExitStack() as stack:
        started: list[str] = []

        def start(_number: int) -> None:
            lease = small.lease(fraction_milli=125)
            fields = stack.enter_context(started_for(lease.lease_id))
            assert attach(small, lease.lease_id, lease.token, fields).status == 200
            started.append(lease.lease_id)

        with ThreadPoolExecutor(30) as threads:
            list(threads.map(start, range(30)))
        assert len(started) == 30


def test_a_kernel_without_a_gate_that_starts_late_has_its_device_or_is_told_to_start_again() -> None:
    with live_broker(pools={"default": {"unattached_hold": 0}}) as small:
        first = small.lease(fraction_milli=1000, gated=False)
        with started_for(first.lease_id) as fields:
            assert attach(small, first.lease_id, first.token, fields).status == 200, "no other kernel waited"
        small.call("DELETE", f"/v1/leases/{first.lease_id}")
        late = small.lease(fraction_milli=1000, gated=False, wait_ms=5000)
        other = small.lease(fraction_milli=1000, gated=False, wait_ms=5000)
        with started_for(other.lease_id) as fields:
            assert attach(small, other.lease_id, other.token, fields).status == 200
            with started_for(late.lease_id) as late_fields:
                refused = attach(small, late.lease_id, late.token, late_fields)
        assert (refused.status, refused.error["code"]) == (409, "no-room")
        assert "unattached_hold" in refused.error["message"]


def test_a_watch_is_made_of_what_an_attach_accepted(live: LiveBroker) -> None:
    lease = live.lease()
    with started_for(lease.lease_id) as fields:
        assert attach(live, lease.lease_id, lease.token, fields).status == 200
        kernel = live.broker.kernels[lease.lease_id]
        assert isinstance(kernel.iopub, IOPubWatch)
        assert kernel.busy


def test_the_changes_of_a_lease_are_counted_for_it_and_for_no_other(live: LiveBroker) -> None:
    lease, other = live.lease(), live.lease()
    kernels, before = live.broker.kernels, live.broker.changes
    own, others = kernels[lease.lease_id].changes, kernels[other.lease_id].changes
    with started_for(lease.lease_id) as fields:
        assert attach(live, lease.lease_id, lease.token, fields).status == 200
    assert kernels[lease.lease_id].changes > own
    assert live.broker.changes > before
    assert kernels[other.lease_id].changes == others
