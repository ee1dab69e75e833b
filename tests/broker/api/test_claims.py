"""Claims in the API: whose they are, which process may hold one, and what they count as."""

import os
from typing import Any

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.jupyter import mcp
from fractional_gpu.protocol.messages import AcquireRequest, PinRequest
from tests.broker.live import BECOME_NOBODY, LiveBroker, attach_fields, live_broker
from tests.support.callers import caller

pytestmark = pytest.mark.promise("claims")


def granted(live: LiveBroker, **fields: Any) -> str:  # noqa: ANN401 - LeaseRequest's
    """A claim that has its room."""
    reply = live.lease(**{"kind": "claim", "fraction_milli": 125, **fields})
    with BrokerClient(live.socket, token=reply.token) as client:
        assert [line.kind for line in client.acquire(reply.lease_id, AcquireRequest())] == ["granted"]
    return reply.lease_id


def release(live: LiveBroker, lease_id: str) -> None:
    assert live.call("DELETE", f"/v1/leases/{lease_id}").body == {"ok": True}


@pytest.mark.parametrize(("mib", "milli"), [(1, 125), (128, 125), (129, 250), (600, 750), (1024, 1000)])
def test_memory_alone_takes_the_smallest_fraction_that_covers_it(live: LiveBroker, mib: int, milli: int) -> None:
    lease = live.lease(kind="claim", fraction_milli=0, memory_mib=mib)
    assert live.call("GET", f"/v1/leases/{lease.lease_id}").body["lease"]["spec"]["fraction_milli"] == milli
    release(live, lease.lease_id)


def test_another_user_neither_renews_nor_releases_a_claim(live: LiveBroker) -> None:
    lease_id = granted(live, ttl_ms=600_000)
    with BrokerClient(live.socket) as client:
        end_ms = client.lease(lease_id).lease.pinned_until_ms
        with caller(live.socket, first=BECOME_NOBODY) as nobody:
            status, refused = nobody.call("POST", f"/v1/leases/{lease_id}/pin", body={"duration_ms": 1})
            assert (status, refused["error"]["reason"]) == (404, "unknown-lease")
            nobody.call("DELETE", f"/v1/leases/{lease_id}")
        after = client.lease(lease_id).lease
        assert (after.state, after.pinned_until_ms) == ("resident", end_ms)
        assert client.pin(lease_id, PinRequest(duration_ms=60_000)).lease.pinned_until_ms < end_ms
    release(live, lease_id)


def test_another_user_s_process_holds_no_claim(live: LiveBroker) -> None:
    with caller(live.socket, first=BECOME_NOBODY) as nobody:
        body = {"fraction_milli": 125, "kind": "claim", "holder_pid": os.getpid()}
        status, refused = nobody.call("POST", "/v1/leases", body=body)
    assert (status, refused["error"]["reason"]) in {(403, "wrong-uid"), (400, "no-process")}


def test_a_claim_lasts_a_moment_at_least(live: LiveBroker) -> None:
    refused = live.call("POST", "/v1/leases", {"kind": "claim", "fraction_milli": 125, "ttl_ms": -1})
    assert refused.error["reason"] == "claim-too-short"


def test_a_watcher_does_not_end_a_claim_that_waits(live: LiveBroker) -> None:
    holding, waiting = granted(live, fraction_milli=1000), live.lease(kind="claim", fraction_milli=125)
    with BrokerClient(live.socket, token=waiting.token) as client:
        request = AcquireRequest(watch=True, wait_ms=0)
        assert [line.kind for line in client.acquire(waiting.lease_id, request)][-1] == "refused"
        assert client.lease(waiting.lease_id).lease_id == waiting.lease_id
    release(live, waiting.lease_id)
    release(live, holding)


def test_an_agent_releases_reservations_twice_and_nothing_else(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(live.socket))
    monkeypatch.setattr(mcp, "_failure", lambda: RuntimeError)
    claim, program = granted(live), live.lease(kind="command", fraction_milli=125).lease_id
    assert [mcp.gpu_release(claim) for _ in range(2)] == [{"ok": True}] * 2
    with pytest.raises(RuntimeError, match="end the command instead"):
        mcp.gpu_release(program)
    release(live, program)


def test_a_claim_has_no_process(live: LiveBroker) -> None:
    lease = live.lease(kind="claim", fraction_milli=125)
    answer = live.call("POST", f"/v1/leases/{lease.lease_id}/attach", attach_fields(os.getpid()), token=lease.token)
    assert (answer.status, answer.error["reason"]) == (409, "claim")
    release(live, lease.lease_id)


def test_claims_count_for_the_limits_of_their_user() -> None:
    with live_broker(pools={"default": {"user_limits": {"fraction": "1/4"}, "pin_budget": "1h"}}) as live:
        lease_id = granted(live, ttl_ms=1_800_000)
        request = {"kind": "claim", "fraction_milli": 125}
        body = live.call("POST", "/v1/leases", {**request, "ttl_ms": 3_600_000})
        assert body.error["reason"] == "pin-budget"
        body = live.call("POST", "/v1/leases", {**request, "fraction_milli": 250, "ttl_ms": 60_000})
        assert body.error["reason"] == "user-limit"
        release(live, lease_id)
