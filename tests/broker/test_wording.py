"""The broker's refusals as users read them: golden/refusals.txt. Other tests assert codes, reasons and names in a sentence."""

import ast
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from pwd import getpwnam
from typing import Any

import pytest
from msgspec import to_builtins

from fractional_gpu.broker.accounting import budgets
from fractional_gpu.broker.api import server
from fractional_gpu.broker.kernels import request_validation
from fractional_gpu.broker.kernels.connection import check_endpoints, connection_from_json
from fractional_gpu.broker.services import residency
from fractional_gpu.host.peers import PeerCredentials
from fractional_gpu.protocol.limits import VERSION_HEADER
from fractional_gpu.protocol.messages import LeaseReply, LeaseRequest, ProgressKind
from fractional_gpu.protocol.names import ACTING_FOR
from tests.broker.live import Answer, LiveBroker, live_broker, started_for
from tests.support.golden import check_wording
from tests.support.paths import ROOT

GOLDEN = Path(__file__).with_name("golden") / "refusals.txt"
NOBODY = getpwnam("nobody")
LEASE = {"fraction_milli": 250}
SEAT = {"owner": "ada", "pool": "default", "fraction_milli": 250}
CLOSED = time.strftime("%a", time.localtime(time.time() + 3 * 86_400))  # a date far from today

# Reasons that need a failing machine, a race, or thousands of requests; other tests cover them.
ELSEWHERE = frozenset(
    {
        "audit-log",
        "does-not-end",
        "lost-lease",
        "no-device",
        "no-permission",
        "not-certain",
        "not-measured",
        "not-permitted",
        "replaced",
        "seat-devices",
        "seat-terms",
        "too-many-leases",
        "too-many-leases-of-a-user",
        "too-many-requests",
    }
)


@dataclass
class Refusals:
    """The broker's refusals by request."""

    live: LiveBroker
    said: dict[str, str] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=lambda: {os.getpid()})

    def of(self, heading: str, answer: Answer) -> None:
        """Record a refusal. Fails if it is none, or if the heading is already used."""
        assert heading not in self.said
        error = (
            answer.error if answer.status >= 400 else answer.body
        )  # a seat's refusal is the last line of its progress
        assert answer.status >= 400 or error["kind"] == ProgressKind.REFUSED, heading
        what = f"{answer.status} {error['code']}" if answer.status >= 400 else error["kind"]
        self.reasons.add(error["reason"])
        self.said[heading] = f"{what}, {error['reason']}\n{self._example(error.get('message') or error['sentence'])}"

    def post(self, heading: str, target: str, body: object = None, **how: str) -> None:
        """Record the refusal of a POST."""
        self.of(heading, self.live.call("POST", target, {} if body is None else body, **how))

    def _example(self, sentence: str) -> str:
        """Replace what differs between runs by example values."""
        for pid in self.pids:
            sentence = re.sub(rf"\b{pid}\b", "4711", sentence)
        sentence = re.sub(r"SIM-[0-9a-f-]+", "SIM-0a1b2c3d", sentence)
        sentence = re.sub(r"\bkernel [0-9a-f]{8}\b", "kernel 0a1b2c3d", sentence)
        return re.sub(rf"\b{CLOSED}\b", "Mon", sentence)


@contextmanager
def as_another(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the broker see an ordinary user."""
    with monkeypatch.context() as patch:
        patch.setattr(server, "peer_credentials", lambda _: PeerCredentials(os.getpid(), NOBODY.pw_uid, NOBODY.pw_gid))
        yield


def leases(note: Refusals) -> None:
    """Requests for leases that are refused to all users."""
    wishes: dict[str, dict[str, Any]] = {
        "a pool that is not there": {"pool": "gold"},
        "a fraction out of range": {"fraction_milli": 1500},
        "a fraction that the pool does not offer": {"fraction_milli": 260},
        "a fraction that is text": {"fraction_milli": "1/4"},
        "no memory": {"memory_mib": 0},
        "more memory than a device has": {"memory_mib": 2048},
        "guaranteed memory in a pool that reserves all": {"request_mib": 100},
        "more devices than there are": {"devices": 2},
        "a priority out of range": {"priority": 5000},
        "another kind": {"kind": "job"},
        "a claim that is too long": {"kind": "claim", "ttl_ms": 7_200_000},
        "a claim with a holder that is not there": {"kind": "claim", "holder_pid": 2**22 + 1},
        "a label that is too long": {"label": "x" * 201},
        "a field that is not known": {"memmory_mib": 5},
        "an entry that is too long": {"label": "x" * 5000},
        "a NUL character": {"label": "a\0b"},
    }
    for what, wish in wishes.items():
        note.post(f"a lease, {what}", "/v1/leases", {**LEASE, **wish})
    for what, body in {"nothing": b"", "no JSON": b"{", "a list": b"[1]", "300 KiB": b" " * 300_000}.items():
        note.post(f"a lease, the body is {what}", "/v1/leases", body)
    for what, header in {"in chunks": ("Transfer-Encoding", "chunked"), "long": ("Content-Length", "long")}.items():
        note.post(f"a lease, the body is {what}", "/v1/leases", b"", **{header[0]: header[1]})
    with ExitStack() as stack:
        lease = attached(note, stack)
        note.post("a lease without a gate, no device is free", "/v1/leases", {"fraction_milli": 1000, "gated": False})
        note.live.call("DELETE", f"/v1/leases/{lease.lease_id}")


def attached(note: Refusals, stack: ExitStack, **fields: Any) -> LeaseReply:  # noqa: ANN401 - LeaseRequest's
    """A kernel without a gate, which is on the device from its start."""
    lease = note.live.lease(**{"fraction_milli": 250, "gated": False, **fields})
    process = stack.enter_context(started_for(lease.lease_id))
    note.pids.add(process["pid"])
    answer = note.live.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
    assert answer.status == 200, answer
    return lease


def kernels(note: Refusals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals about an existing lease."""
    live, lease, other = note.live, note.live.lease(), note.live.lease()
    target = f"/v1/leases/{lease.lease_id}"
    note.of("a lease that is not there", live.call("GET", "/v1/leases/nothing"))
    note.post("an attach without a token", f"{target}/attach", {})
    note.of("what others use, of too long a time", live.call("GET", f"{target}/others?last_ms=60001"))
    note.of("what others use, too many leases named", live.call("GET", f"{target}/others?without={','.join('a' * 65)}"))
    note.post("an attach with another lease's token", f"{target}/attach", {}, token=other.token)
    note.of("a token that is not a bearer's", live.call("GET", target, Authorization="Basic YQ=="))
    note.of("another version", live.call("GET", "/v1/status", **{VERSION_HEADER: "99.0.0; protocol=99"}))
    note.of("a route that is not there", live.call("GET", "/v1/nothing"))
    note.of("a method that is not there", live.call("PUT", "/v1/leases", {}))
    with started_for(lease.lease_id) as process, started_for(other.lease_id) as foreign:
        note.pids |= {process["pid"], foreign["pid"]}

        def attach(heading: str, **fields: object) -> None:
            note.post(f"an attach, {heading}", f"{target}/attach", {**process, **fields}, token=lease.token)

        attach("a process that is not there", pid=2**22 + 1)
        claim = live.lease(kind="claim")
        note.post("an attach to a claim", f"/v1/leases/{claim.lease_id}/attach", process, token=claim.token)
        live.call("DELETE", f"/v1/leases/{claim.lease_id}")
        attach("a process with another start", start_time=1)
        with monkeypatch.context() as patch:
            patch.setattr(request_validation, "_EXEC_PATIENCE_S", 0.0)
            note.post("an attach, another lease's process", f"{target}/attach", foreign, token=lease.token)
            patch.setattr(request_validation, "owner_uid", lambda _: NOBODY.pw_uid)
            attach("another user's process")
        attach("a connection over another transport", connection={"transport": "udp"})
        assert live.call("POST", f"{target}/attach", process, token=lease.token).status == 200
        note.post("a move of a kernel without a context", f"{target}/move", {})
        note.post("a move to a device that is not there", f"{target}/move", {"device": "7"})
        note.post("an eviction that is not confirmed", f"{target}/evict", {})
        note.post("a pin for no time", f"{target}/pin", {"duration_ms": 0})
        note.post("a pin that is too long", f"{target}/pin", {"duration_ms": 10**9})
        note.post("a resize, a fraction out of range", f"{target}/resize", {"fraction_milli": 0})
        note.post("a resize, a fraction that the pool does not offer", f"{target}/resize", {"fraction_milli": 260})
        note.post("an end of what was not left behind", f"{target}/end", {})
    note.post("a resume without a process", f"/v1/leases/{other.lease_id}/resume")
    with ExitStack() as stack:
        first = attached(note, stack)
        attached(note, stack, fraction_milli=750)
        body = {"fraction_milli": 500, "wait_ms": 1}
        note.post("a resize without room", f"/v1/leases/{first.lease_id}/resize", body)


def administration(note: Refusals, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only administrators may do, and what not even they may do."""
    with as_another(monkeypatch):
        note.post("a drain, by an ordinary user", "/v1/devices/0/drain", {})
        note.post("a change of a pool, by an ordinary user", "/v1/pools/default", {"keys": {}})
        note.post("a seat, by an ordinary user", "/v1/seats", SEAT)
        note.post("a lease, for another user", "/v1/leases", LEASE, **{ACTING_FOR: "ada"})
        note.post("a lease, a priority above the pool's", "/v1/leases", {**LEASE, "priority": 5})
    note.post("a change of a pool that is not there", "/v1/pools/gold", {"keys": {}})
    note.post("a change of a pool's devices", "/v1/pools/default", {"keys": {"devices": [0]}})
    note.post("a change of a pool to no duration", "/v1/pools/default", {"keys": {"idle_after": "soon"}})
    note.post("a change of a pool's key that is not there", "/v1/pools/default", {"keys": {"idle_afetr": "5m"}})


def connections() -> dict[str, str]:
    """What a kernel's connection must not be."""
    fields: dict[str, dict[str, Any]] = {
        "an address of the network": {"ip": "10.0.0.1"},
        "a relative path": {"transport": "ipc", "ip": "kernel"},
        "another scheme": {"signature_scheme": "hmac-none"},
        "a key that is a number": {"key": 5},
        "no port": {},
        "half a pair of keys": {"iopub_port": 9000, "shell_port": 9001, "curve_publickey": "x"},
        "a port of the system's": {"iopub_port": 22, "shell_port": 9001},
        "a folder that is not there": {"transport": "ipc", "ip": "/nowhere/kernel", "iopub_port": 1, "shell_port": 2},
        "a folder that others may write": {"transport": "ipc", "ip": "/tmp/kernel", "iopub_port": 1, "shell_port": 2},  # noqa: S108 - it is refused
    }
    said = {}
    for what, info in fields.items():
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - its sentence goes into the file
            check_endpoints(connection_from_json(info), 0 if "folder" in what else NOBODY.pw_uid, os.getpid())
        said[f"a connection, {what}"] = str(refused.value)
    return said


def seats(note: Refusals) -> None:
    """Refusals about seats, and about kernels on them."""
    live = note.live
    wishes: dict[str, dict[str, Any]] = {
        "a pool that is not there": {"pool": "gold"},
        "a fraction out of range": {"fraction_milli": 0},
        "a fraction that the pool does not offer": {"fraction_milli": 260},
        "nobody's": {"owner": ""},
        "a user's name that cannot be printed": {"owner": "a\x1b[2Jda"},
        "a server's name that is too long": {"server": "x" * 300},
        "a hub's name that is too long": {"hub": "x" * 300},
        "no time to live": {"ttl_ms": 0},
        "too many groups": {"groups": [str(number) for number in range(5000)]},
        "more memory than a device has": {"memory_mib": 5000},
        "more than a user may have": {"fraction_milli": 1000},
        "an engine that is not known": {"workload": {"engine": "pbs", "id": "12"}},
        "a job's number that is none": {"workload": {"engine": "slurm", "id": "twelve"}},
        "no device": {"allowed_devices": []},
    }
    for what, wish in wishes.items():
        note.post(f"a seat, {what}", "/v1/seats", {**SEAT, **wish})
    note.post("a seat that is not there is confirmed", "/v1/seats/nothing/confirm", {})
    note.post("a lease without a seat", "/v1/leases", LEASE)
    seat = live.call("POST", "/v1/seats", {**SEAT, "fraction_milli": 500}).body

    def kernel(heading: str, token: str = seat["token"], **fields: object) -> None:
        request = LeaseRequest(**{"fraction_milli": 250, "seat": seat["seat_id"], **fields})
        note.post(f"a lease on a seat, {heading}", "/v1/leases", to_builtins(request), token=token)

    kernel("another token", token="guess")  # noqa: S106 - of no seat
    kernel("another pool", pool="other")
    kernel("a higher priority", priority=5)
    kernel("more than the seat", fraction_milli=750)
    kernel("more memory than the seat", memory_mib=700)
    for _ in range(2):
        body = {"fraction_milli": 125, "seat": seat["seat_id"]}
        assert live.call("POST", "/v1/leases", body, token=seat["token"]).status == 200
    kernel("more than it has beside others", fraction_milli=500)
    kernel("too many kernels", fraction_milli=125)
    assert live.call("POST", "/v1/seats", {**SEAT, "server": "other"}).body["kind"] == "granted"
    note.post(
        "a seat beside others, more than a user may have",
        "/v1/seats",
        {**SEAT, "server": "third", "fraction_milli": 500},
    )
    job = live.call("POST", "/v1/seats", {**SEAT, "owner": "job", "workload": {"engine": "slurm", "id": "12"}}).body
    body = {"fraction_milli": 250, "seat": job["seat_id"]}
    note.post("a lease on a job's seat, from outside of the job", "/v1/leases", body, token=job["token"])
    other = live.call("POST", "/v1/seats", {**SEAT, "owner": "eve", "uid": 12_345}).body
    with pytest.MonkeyPatch.context() as patch, as_another(patch):
        body = {"fraction_milli": 250, "seat": other["seat_id"]}
        note.post("a lease on a seat of another user of the machine", "/v1/leases", body, token=other["token"])


POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a pool for members, of another group": ({"groups": {"staff": {}}}, {"groups": ["students"]}),
    "a pool for members, of no group": ({"groups": {"staff": {}}}, {}),
    "a pool that is closed": ({"hours": f"{CLOSED} 08:00-08:30"}, {}),
    "more than a group may have": (
        {"groups": {"staff": {}}, "group_limits": {"staff": {"fraction": "1/8"}}},
        {"groups": ["staff"]},
    ),
}


def policies(said: dict[str, str], reasons: set[str]) -> None:
    """What a pool's policy refuses."""
    for what, (policy, wish) in POLICIES.items():
        with live_broker(pools={"default": policy}) as live:
            Refusals(live, said, reasons).post(f"a seat, {what}", "/v1/seats", {**SEAT, **wish})
    full: dict[str, dict[str, Any]] = {
        "a pool that has promised all": {"oversubscription": 1, "wait_bound": "100%"},
        "a pool whose cells would wait too long": {"wait_bound": "1%"},
    }
    for what, policy in full.items():
        with live_broker(pools={"default": policy}) as live:
            first = live.call("POST", "/v1/seats", {**SEAT, "owner": "bob", "fraction_milli": 1000})
            assert first.body["kind"] == "granted"
            Refusals(live, said, reasons).post(f"a seat, {what}", "/v1/seats", SEAT)
    with live_broker(pools={"default": {"reserve": "use"}}) as live:
        Refusals(live, said, reasons).post(
            "a lease, guaranteed memory beyond the cap", "/v1/leases", {**LEASE, "request_mib": 1000}
        )


def accounts(said: dict[str, str], reasons: set[str]) -> None:
    """Refusals about usage and budgets."""
    none_left = {"user": "*", "limit": "0 GPU hours", "per": "month"}
    pools = {"default": {"over_budget": "no-new-seats"}}
    with live_broker(budgets=[none_left], pools=pools) as live:
        note = Refusals(live, said, reasons)
        for what, query in {
            "by something else": "by=colour",
            "twice by the same": "by=user,user",
            "since a word": "since_s=monday",
            "of a name that is too long": f"user={'x' * 300}",
        }.items():
            note.of(f"usage, {what}", live.call("GET", f"/v1/usage?{query}"))
        more = {"kind": "user", "name": "ada", "amount": "10 GPU hours"}
        note.post("a budget, no amount", "/v1/budgets/extend", {**more, "amount": "much"})
        note.post("a budget, of no such account", "/v1/budgets/extend", {**more, "account": "cloud"})
        note.post("a budget, until the past", "/v1/budgets/extend", {**more, "until_s": 1})
        note.post("a budget that is not there", "/v1/budgets/extend", {**more, "amount": "10 EUR"})
        with pytest.MonkeyPatch.context() as patch, as_another(patch):
            note.post("a budget, by an ordinary user", "/v1/budgets/extend", more)
        with pytest.MonkeyPatch.context() as patch:
            until_s = int(datetime(2026, 12, 1).astimezone().timestamp())
            patch.setattr(budgets, "end_of", lambda *_: until_s)
            note.post("a seat, the budget is used up", "/v1/seats", SEAT)


def written_reasons() -> set[str]:
    """Return the reasons that the broker's sources give for refusals."""
    found = set()
    for file in (ROOT / "provisioner/fractional_gpu/broker").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                values = [one.value for one in node.exc.keywords if one.arg == "reason"]
                found |= {str(one.value) for one in values if isinstance(one, ast.Constant)}
    return found


def test_the_refusals_of_the_broker_are_as_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_IDLE_PATIENCE_S", 0.01)
    passages, reasons = dict[str, str](), set[str]()
    with live_broker() as live:
        note = Refusals(live, passages, reasons)
        leases(note)
        kernels(note, monkeypatch)
        administration(note, monkeypatch)
    passages |= connections()
    pools: dict[str, Any] = {
        "default": {"wait_bound": "100%", "kernels_per_seat": 2, "user_limits": {"fraction": "3/4"}, "devices": [0]},
        "other": {"devices": [1]},
    }
    with live_broker("2x1GiB", seats_required=True, pools=pools) as live:
        seats(Refusals(live, passages, reasons))
    policies(passages, reasons)
    accounts(passages, reasons)
    lacking = written_reasons() - reasons
    assert lacking == ELSEWHERE, f"not here: {sorted(lacking - ELSEWHERE)}; here: {sorted(ELSEWHERE - lacking)}"
    check_wording(GOLDEN, passages)
