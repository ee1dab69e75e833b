"""The seats of pods: what a pod may ask for, and a real broker whose peers are in real control groups of pods."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from msgspec import convert, to_builtins

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.engines.engine import EngineError
from fractional_gpu.engines.pod_seats import PodSeats, in_use, request_of
from fractional_gpu.engines.pods import Pod, PodSpec, shares_of, whole_quantity
from fractional_gpu.protocol.messages import LeaseRequest
from fractional_gpu.protocol.status import SeatStatus
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker
from tests.engines.kubernetes.pods import pod_of, read_of, uid_of
from tests.support.callers import Caller, caller
from tests.support.control_group import JOIN, pod_group

pytestmark = pytest.mark.promise("pods")

POOL = "fractional-gpu.jupyter.org/pool"
FRACTION = "fractional-gpu.jupyter.org/fraction"
OWNER = "fractional-gpu.jupyter.org/owner"
SERVER = "fractional-gpu.jupyter.org/server"


# -- what a pod asks for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [("250", 250), ("1k", 1000), ("0.25k", 250), ("1e3", 1000), ("2Ki", 2048), ("500000m", 500), (7, 7)],
)
def test_quantities_have_the_forms_of_kubernetes(text: object, number: int) -> None:
    assert whole_quantity(text) == number


@pytest.mark.parametrize("text", ["", "250m", "-1", "1/4", "0.5", "1e99999", "٢", None, True, 2.5, "1 k"])
def test_what_is_no_whole_number_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"not a valid quantity|not a whole number"):
        whole_quantity(text)


def _container(milli: str, **more: str) -> dict[str, Any]:
    return {"resources": {"limits": {"fractional-gpu.jupyter.org/default": milli, "cpu": "1"}}, **more}


def _shares(spec: dict[str, Any]) -> dict[str, int]:
    return shares_of(convert(spec, PodSpec))


def test_a_pods_share_is_what_the_scheduler_counts() -> None:
    """The sum of the containers and the init containers that stay, or the largest moment before, if that is more."""
    assert _shares({"containers": [_container("250"), _container("125"), {}]}) == {"default": 375}
    assert _shares({"containers": [_container("250")], "initContainers": [_container("1k")]}) == {"default": 1000}
    stays = _container("100", restartPolicy="Always")
    assert _shares({"containers": [_container("250")], "initContainers": [stays, _container("200")]}) == {
        "default": 350
    }
    assert _shares({"containers": [{"resources": {"requests": {"nvidia.com/gpu": "1"}}}]}) == {}
    assert _shares({}) == {}


def _request(**changes: Any) -> Any:  # noqa: ANN401 - pod_of's
    hub = changes.pop("hub_namespaces", ("jhub",))
    return request_of(read_of(pod_of(1, **changes)), hub)


def test_a_hubs_pod_states_its_owner_and_any_other_does_not() -> None:
    named = {OWNER: "ada", SERVER: "lab", POOL: "default", FRACTION: "250m"}
    request = _request(annotations=named)
    assert (request.owner, request.server, request.pool, request.fraction_milli) == ("ada", "lab", "default", 250)
    assert (request.admitted, request.workload.engine, request.workload.id) == (True, "kubernetes", uid_of(1))
    assert request.groups == ["kubernetes", "kubernetes:jhub"]
    for forged in (_request(annotations=named, namespace="students"), _request(annotations=named, hub_namespaces=())):
        assert (forged.owner.partition("/")[2], forged.server) == ("jupyter-1", f"pod-{uid_of(1)}")
    other = _request(annotations=named, namespace="course", hub_namespaces=("jhub", "course"))
    assert other.owner == request.owner
    assert other.hub != request.hub, "else a pod of the one hub would end the seat of the other hub's"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"milli": "2k"}, "2000 thousandths of a GPU of pool default; a share is at most 1000"),
        ({"milli": "2k", "annotations": {FRACTION: "250m"}}, "at most 1000"),
        ({"milli": None, "annotations": {POOL: "default"}}, "request no share; add fractional-gpu.jupyter.org/POOL"),
        ({"annotations": {FRACTION: "1000m"}}, "fraction is '1000m', but it requests '250m'"),
        ({"annotations": {POOL: "large"}}, "pool is 'large', but it requests 'default'"),
    ],
)
def test_a_pod_that_says_other_than_it_requests_gets_no_seat(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        _request(**changes)


# -- a broker --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker(
        pools={"default": {"wait_bound": "100%", "kernels_per_seat": 8, "oversubscription": 2}}, seats_required=True
    ) as live:
        yield live


class Notes:
    """Records the annotations written; raises `error` instead if it is set."""

    def __init__(self) -> None:
        self.written: list[tuple[str, dict[str, str]]] = []
        self.error: EngineError | None = None

    def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        if self.error is not None:
            raise self.error
        self.written.append((pod.metadata.name, dict(annotations)))


class Node:
    """The seats that one node's pods have at the broker."""

    def __init__(self, live: LiveBroker) -> None:
        self.said: list[str] = []
        self.live = live
        self.notes = Notes()
        self.seats = PodSeats(self.client, self.said.append, self.notes.annotate, hub_namespaces=("jhub",))

    def client(self) -> SeatClient:
        return SeatClient(self.live.socket, timeout_s=DEADLINE_S)

    def keep(self, *found: dict[str, Any]) -> None:
        self.seats.keep([read_of(pod) for pod in found])

    def listed(self) -> dict[str, SeatStatus]:
        with self.client() as client:
            return {seat.workload.id: seat for seat in client.seats().seats if seat.workload is not None}


@pytest.fixture
def node(live: LiveBroker) -> Iterator[Node]:
    node = Node(live)
    yield node
    node.keep()


def test_a_seat_comes_with_its_pod_and_ends_with_it(node: Node) -> None:
    node.keep(pod_of(1, annotations={OWNER: "ada"}), pod_of(2, "500"), pod_of(3, None))
    seats = node.listed()
    assert {uid: (seat.owner, seat.fraction_milli, seat.confirmed) for uid, seat in seats.items()} == {
        uid_of(1): ("ada", 250, True),
        uid_of(2): ("jhub/jupyter-2", 500, True),
    }
    node.keep(pod_of(1, annotations={OWNER: "ada"}), pod_of(2, "500", phase="Failed"))
    assert node.listed().keys() == {uid_of(1)}, "a pod that has ended runs nothing"
    node.seats.keep(None)
    assert node.listed().keys() == {uid_of(1)}, "unknown pods are not gone"
    node.keep(pod_of(1, annotations={OWNER: "ada"}))
    assert node.listed()[uid_of(1)].seat_id == seats[uid_of(1)].seat_id, "it is not taken again"
    another = PodSeats(node.client, node.said.append, node.notes.annotate)  # an agent that has restarted
    another.keep([])
    assert node.listed() == {}
    assert node.said[0].startswith("pod jhub/jupyter-1: granted: 250 thousandths of a GPU of pool default")


def test_a_refusal_is_said_once_and_tried_again(node: Node) -> None:
    pods = [pod_of(number, "1k") for number in range(1, 6)]
    for _ in range(2):
        node.keep(*pods)
    refused = [sentence for sentence in node.said if "refused:" in sentence]
    assert len(refused) == len(set(refused)) == 5 - len(node.listed())
    assert 0 < len(node.listed()) < 5
    gone = [pod for pod in pods if pod["metadata"]["uid"] not in node.listed()]
    node.keep(*gone)
    node.keep(*gone)
    assert set(node.listed()) & {pod["metadata"]["uid"] for pod in gone}, "room has become free"


@contextmanager
def kernel_in(live: LiveBroker, uid: str) -> Iterator[Caller]:
    with pod_group(uid) as group, caller(live.socket, first=JOIN.format(group=str(group))) as client:
        yield client


def lease_in(client: Caller, milli: int = 125) -> tuple[int, Any]:
    body = to_builtins(LeaseRequest(fraction_milli=milli))
    return client.call("POST", "/v1/leases", "", body)


def test_a_kernel_is_known_by_its_pods_control_group(node: Node, live: LiveBroker) -> None:
    """The pod contains no token. Processes in another pod, or in none, get nothing."""
    uid, other = str(uuid4()), str(uuid4())
    pod = pod_of(1, annotations={OWNER: "ada"})
    pod["metadata"]["uid"] = uid
    with kernel_in(live, uid) as own, kernel_in(live, other) as stranger:
        assert lease_in(own)[1]["error"]["reason"] == "no-seat", "before the agent has seen the pod"
        node.keep(pod)
        status, lease = lease_in(own)
        assert status == 200, lease
        assert node.listed()[uid].used_milli == 125
        status, refused = lease_in(own, 250)
        assert (status, refused["error"]["reason"]) != (200, None)
        assert status != 200, "the pod's kernels share its seat"
        assert lease_in(stranger)[1]["error"]["reason"] == "no-seat"
        outside = live.call("POST", "/v1/leases", to_builtins(LeaseRequest(fraction_milli=125)))
        assert outside.error["reason"] == "no-seat"
        forged = live.call(
            "POST", "/v1/leases", to_builtins(LeaseRequest(fraction_milli=125, seat=node.listed()[uid].seat_id))
        )
        assert forged.error["reason"] == "foreign-seat", "a seat's id is no token"


def test_a_pod_is_told_of_its_seat_and_of_what_it_used_once_for_each_change(node: Node, live: LiveBroker) -> None:
    uid, notes = str(uuid4()), node.notes
    pod = pod_of(1, annotations={OWNER: "ada"})
    pod["metadata"]["uid"] = uid
    node.keep(pod)

    def write() -> None:
        node.seats.note([read_of(pod), read_of(pod_of(2, None))])

    write()
    ((name, first),) = notes.written
    pod["metadata"]["annotations"] |= first
    write()
    assert len(notes.written) == 1
    assert (name, list(first)) == ("jupyter-1", ["fractional-gpu.jupyter.org/seat"])
    with kernel_in(live, uid) as kernel:
        assert lease_in(kernel)[0] == 200
        write()
    assert notes.written[-1][1]["fractional-gpu.jupyter.org/usage"].startswith("jupyter-gpu: kernels=1 reserved=")
    assert not any("annotated" in sentence for sentence in node.said)


def test_what_the_scheduler_gave_away_is_counted_by_pool() -> None:
    found = [
        read_of(pod_of(1)),
        read_of(pod_of(2, "1k")),
        read_of(pod_of(3, pool="large")),
        read_of(pod_of(4, phase="Failed")),
    ]
    assert in_use(found) == {"default": 1250, "large": 250}
