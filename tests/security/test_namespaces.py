"""What a process in private namespaces, or in another job, cannot gain by its claims."""

from collections.abc import Iterator
from typing import Any

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.host.namespaces import namespace_of, nested_pids, own_namespace, pid_meant_by
from fractional_gpu.protocol.messages import Workload
from fractional_gpu.protocol.seats import SeatProgress, SeatRequest
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker, started_for
from tests.support.callers import Caller, caller
from tests.support.control_group import JOIN, job_group, memory_group

pytestmark = pytest.mark.promise("namespaces")

NESTED = ["unshare", "--pid", "--fork", "--mount-proc"]
POOLS: dict[str, Any] = {"default": {"wait_bound": "100%", "unattached_leases": 64, "unattached_share": "100%"}}
AS_NOBODY = """
import os, pwd
nobody = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(nobody.pw_gid); os.setuid(nobody.pw_uid)
"""
# After that the process is in private user, pid and mount namespaces, as any user can create them.
UNPRIVILEGED = (
    AS_NOBODY
    + """
import ctypes, signal
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000 | 0x20000000 | 0x00020000) == 0, os.strerror(ctypes.get_errno())
child = os.fork()
if child:
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
libc.prctl(1, signal.SIGKILL)
assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0, os.strerror(ctypes.get_errno())
"""
)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker(pools=POOLS) as live:
        yield live


def lease(who: Caller, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - LeaseRequest's
    status, reply = who.call("POST", "/v1/leases", body={"fraction_milli": 125, **fields})
    assert status == 200, reply
    assert isinstance(reply, dict)
    return reply


def attach(who: Caller, lease: dict[str, Any], fields: dict[str, Any]) -> tuple[int, Any]:
    return who.call("POST", f"/v1/leases/{lease['lease_id']}/attach", lease["token"], fields)


def pid_of(live: LiveBroker, lease: dict[str, Any]) -> int:
    pid = live.call("GET", f"/v1/leases/{lease['lease_id']}").body["pid"]
    assert isinstance(pid, int)
    return pid


@pytest.mark.parametrize(("first", "through"), [("", NESTED), (UNPRIVILEGED, [])], ids=["as root", "without any right"])
def test_a_pid_counts_in_its_senders_namespace(live: LiveBroker, first: str, through: list[str]) -> None:
    with caller(live.socket, first=first, through=through) as pod:
        given = lease(pod)
        own = pod.start_for(given["lease_id"])
        status, attached = attach(pod, given, own)
        assert status == 200, attached
        here = pid_of(live, given)
        assert nested_pids(here)[-1] == own["pid"] != here
        assert namespace_of(here, "pid") != own_namespace("pid")
        assert pid_meant_by(here, own["pid"]) == here


def test_a_pid_of_another_namespace_is_refused(live: LiveBroker) -> None:
    with caller(live.socket, through=NESTED) as pod, caller(live.socket, through=NESTED) as beside:
        given = lease(pod)
        with started_for(
            given["lease_id"]
        ) as outside:  # the same user, the lease's id in its environment: everything but the namespace is right
            status, refused = attach(pod, given, outside)
            assert (status, refused["error"]["reason"]) == (400, "no-process"), refused
            assert "in the caller's pid namespace" in refused["error"]["message"]
        for _ in range(3):
            elsewhere = beside.start_for(given["lease_id"])
        status, refused = attach(pod, given, elsewhere)
        assert status == 400, refused
        assert refused["error"]["reason"] in ("no-process", "wrong-identity")
        status, refused = attach(pod, given, {**pod.start_for(given["lease_id"]), "pid": 1})
        assert (status, refused["error"]["reason"]) == (400, "wrong-identity"), (
            "the first process there, not the machine's"
        )
        assert live.call("GET", f"/v1/leases/{given['lease_id']}").body["pid"] is None


def test_from_outside_a_process_is_named_by_the_pid_that_it_has_there(live: LiveBroker) -> None:
    """A launcher outside may attach a process it started in a namespace; the pid inside would name another process there."""
    with caller(live.socket, through=NESTED) as pod, caller(live.socket) as launcher:
        given = lease(launcher)
        inner = pod.start_for(given["lease_id"])
        pod_lease = lease(pod)
        status, _ = attach(pod, pod_lease, pod.start_for(pod_lease["lease_id"]))
        assert status == 200
        status, refused = attach(launcher, given, inner)
        assert status in (400, 403), refused


def take(live: LiveBroker, job: str) -> SeatProgress:
    request = SeatRequest(
        owner="ada",
        server=job,
        pool="default",
        fraction_milli=250,
        admitted=True,
        workload=Workload(engine="slurm", id=job),
    )
    with SeatClient(live.socket, timeout_s=DEADLINE_S) as client:
        return list(client.take_seat(request))[-1]


def test_another_workloads_seat_is_refused_from_within_namespaces_too(live: LiveBroker) -> None:
    with job_group() as (job, _), job_group() as (_, elsewhere):
        seat = take(live, job)
        join = JOIN.format(group=str(elsewhere))
        inside = [*NESTED, "--cgroup"]  # in a private cgroup namespace, its group is the root
        with caller(live.socket, first=join, through=inside) as thief:
            status, refused = thief.call(
                "POST", "/v1/leases", seat.token, {"fraction_milli": 125, "seat": seat.seat_id}
            )
            assert (status, refused["error"]["reason"]) == (403, "other-workload"), refused


def test_a_group_of_the_same_name_below_another_one_is_no_workload(live: LiveBroker) -> None:
    """A user may give groups any name below a group that was delegated to the user."""
    with job_group() as (job, group), memory_group(4096) as delegated:
        seat = take(live, job)
        made = [
            delegated / f"slurm_jfg{job}",
            *(delegated / f"slurm_jfg{job}" / name for name in ("uid_0", f"uid_0/job_{job}")),
        ]
        for folder in made:
            folder.mkdir()
        assert made[-1].name == group.name
        try:
            with caller(live.socket, first=JOIN.format(group=str(made[-1]))) as forger:
                status, refused = forger.call(
                    "POST", "/v1/leases", seat.token, {"fraction_milli": 125, "seat": seat.seat_id}
                )
        finally:
            for folder in reversed(made):
                folder.rmdir()
    assert (status, refused["error"]["reason"]) == (403, "other-workload"), refused
