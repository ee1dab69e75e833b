"""Manages the seats of the pods on this node. A seat is a pod's share of a GPU, registered with the node's broker.

A pod's extended resource defines its share, because this is what the scheduler has counted. Annotations are checked against it. A seat is
tied to a pod's UID. The pod's kernels need no token, because the broker identifies their pod by its control group. A seat is ended once its
pod is gone, but only after the node's pods have been listed. Any cluster user can create pods, so the owner named by a pod is trusted only
in a hub's namespaces. In other namespaces the owner is `NAMESPACE/POD`. Pools can set terms for the groups `kubernetes` and
`kubernetes:NAMESPACE`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, suppress
from typing import Final

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.engines import pods
from fractional_gpu.engines.accounting import JobFigures, note_leases, sentences_of
from fractional_gpu.engines.engine import EngineError, EngineUnavailableError
from fractional_gpu.engines.pods import Pod
from fractional_gpu.protocol.errors import BadRequestError, ForbiddenError, NoRoomError, NotFoundError
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.messages import KUBERNETES, ProgressKind, Workload
from fractional_gpu.protocol.seats import SeatRequest
from fractional_gpu.protocol.status import SeatStatus

WHOLE: Final = 1000
_TTL_MS: Final = 60_000


def is_ours(pod: Pod) -> bool:
    try:
        asks = bool(pods.shares_of(pod.spec))
    except ValueError:  # the request cannot be parsed, so the seat is refused later, with the reason
        asks = True
    return asks or pods.POOL in pod.annotations or pods.FRACTION in pod.annotations


def request_of(pod: Pod, hub_namespaces: Collection[str] = ()) -> SeatRequest:
    pool, milli = _share(pod)
    for name, meant in ((pods.POOL, pool), (pods.FRACTION, f"{milli}m")):
        if (stated := pod.annotations.get(name, meant)) != meant:
            raise EngineError(
                f"its annotation {name} is {stated[:80]!r}, but it requests {meant!r}; correct or remove the annotation"
            )
    about = pod.metadata
    trusted = about.namespace in hub_namespaces
    owner = pod.annotations.get(pods.OWNER, "") if trusted else ""
    return SeatRequest(
        owner=owner or f"{about.namespace}/{about.name}"[:MAX_NAME],
        # Two hubs may have users and servers with the same names.
        hub=f"{KUBERNETES}:{about.namespace}" if owner else "",
        server=(pod.annotations.get(pods.SERVER, "") if owner else "") or f"pod-{about.uid}",
        pool=pool,
        fraction_milli=milli,
        groups=[KUBERNETES, f"{KUBERNETES}:{about.namespace}"],
        ttl_ms=_TTL_MS,
        admitted=True,
        workload=Workload(engine=KUBERNETES, id=about.uid),
    )


def _share(pod: Pod) -> tuple[str, int]:
    try:
        shares = pods.shares_of(pod.spec)
    except ValueError as error:
        raise EngineError(f"its request for a share cannot be read: {error}") from None
    if not shares:
        raise EngineError(
            f"the pod's annotations name a pool or a fraction, but its containers request no share; add {pods.resource_of('POOL')} to a "
            "container's requests and limits, such as '250' for a quarter of a GPU"
        )
    if len(shares) > 1:
        raise EngineError(
            f"it asks for shares of {len(shares)} pools ({', '.join(shares)}), but a pod can only have one seat; ask for one"
        )
    (pool, milli), *_ = shares.items()
    if milli > WHOLE:
        raise EngineError(
            f"it asks for {milli} thousandths of a GPU of pool {pool}; a share is at most {WHOLE}, a whole GPU; for several GPUs, use "
            "nodes with NVIDIA's device plugin"
        )
    return pool, milli


class PodSeats:
    """Keeps the broker's seats in step with the pods on this node, and annotates each pod with its seat and usage.

    `say` is called with a log line for each change. Pods in `hub_namespaces` may name their owner. `annotate(pod, annotations)` may raise
    EngineError. If permission is missing, this is logged once and annotating stops.
    """

    def __init__(
        self,
        connect: Callable[[], SeatClient],
        say: Callable[[str], None],
        annotate: Callable[[Pod, Mapping[str, str]], None],
        *,
        hub_namespaces: Collection[str] = (),
    ) -> None:
        self._connect = connect
        self._say = say
        self._annotate = annotate
        self._may_annotate = True
        self._hub_namespaces = frozenset(hub_namespaces)
        self._outcomes: dict[str, str] = {}  # a sentence about the seat of each pod, by the pod's UID
        self._figures: dict[str, JobFigures] = {}

    def keep(self, found: Iterable[Pod] | None) -> None:
        """Take and end seats so that every pod requesting a share has one seat. `found` lists the pods, or is None while they are unknown.

        Raises FractionalGPUError if the broker does not answer.
        """
        if found is None:
            return
        wanted = {pod.metadata.uid: pod for pod in found if is_ours(pod) and not pod.ended}
        with closing(self._connect()) as client:
            seated = _seats_by_pod(client)
            for uid, seats in seated.items():
                for seat in seats if uid not in wanted else seats[1:]:
                    with suppress(NotFoundError):
                        client.release_seat(seat.seat_id)
                if uid not in wanted:
                    self._say(f"pod {uid} has ended, and so has its seat")
            for uid, pod in wanted.items():
                if uid not in seated:
                    sentence = self._taken(client, pod)
                    if self._outcomes.get(uid) != sentence:
                        self._outcomes[uid] = sentence
                        self._say(f"pod {pod.metadata.namespace}/{pod.metadata.name}: {sentence}")
        self._outcomes = {uid: sentence for uid, sentence in self._outcomes.items() if uid in wanted}

    def _taken(self, client: SeatClient, pod: Pod) -> str:
        try:
            request = request_of(pod, self._hub_namespaces)
            last = None
            for line in client.take_seat(request):
                last = line
            if last is not None and last.kind == ProgressKind.GRANTED:
                client.confirm_seat(last.seat_id)
                share = f"granted: {request.fraction_milli} thousandths of a GPU of pool {request.pool}, {last.memory_mib} MiB"
                return f"{share}; warning: {last.warning}" if last.warning else share
        except (EngineError, BadRequestError, ForbiddenError, NoRoomError, NotFoundError) as error:
            return f"refused: {error}"
        return f"refused: {last.sentence if last is not None else 'the broker ended the request without a reason; see its log'}"

    def note(self, found: Iterable[Pod]) -> None:
        if not self._may_annotate:
            return
        ours = {pod.metadata.uid: pod for pod in found if is_ours(pod)}
        with closing(self._connect()) as client:
            seats = {uid: seats[0] for uid, seats in _seats_by_pod(client).items() if uid in ours}
            note_leases(client, self._figures, seats)
            self._figures = {uid: figures for uid, figures in self._figures.items() if uid in ours}
            usage = sentences_of(client, self._figures)
        for uid, pod in ours.items():
            values = {pods.SEAT: self._outcomes.get(uid, ""), pods.USAGE: usage.get(uid, "")}
            wanted = {name: text for name, text in values.items() if text and pod.annotations.get(name) != text}
            try:
                if wanted:
                    self._annotate(pod, wanted)
            except EngineUnavailableError as error:
                self._say(f"pod {pod.metadata.namespace}/{pod.metadata.name} could not be annotated: {error}")
                return
            except EngineError as error:
                self._may_annotate = False
                self._say(
                    f"pods will not be annotated; nothing else is affected: {error} (examples/kubernetes/usage grants this permission)"
                )
                return


def _seats_by_pod(client: SeatClient) -> dict[str, list[SeatStatus]]:
    by_uid: dict[str, list[SeatStatus]] = {}
    for seat in client.seats().seats:
        if seat.workload is not None and seat.workload.engine == KUBERNETES:
            by_uid.setdefault(seat.workload.id, []).append(seat)
    return by_uid


def in_use(found: Iterable[Pod]) -> dict[str, int]:
    total: dict[str, int] = {}
    for pod in found:
        with suppress(ValueError):  # the scheduler does not admit a share that is not a number
            for pool, milli in pods.shares_of(pod.spec).items() if not pod.ended else ():
                total[pool] = total.get(pool, 0) + milli
    return total
