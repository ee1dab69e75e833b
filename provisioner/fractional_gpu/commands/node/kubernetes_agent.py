"""`jupyter gpu node agent --engine kubernetes`: the node's counts, the pods' seats, and what is written about them."""

import argparse
import json
import os
import socket as socket_module
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.commands.node.ending import Ending, ending
from fractional_gpu.commands.terminal.text import CommandError, UsageError
from fractional_gpu.engines.agent import Agent, AgentRules
from fractional_gpu.engines.pod_seats import PodNotes, PodSeats
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import KUBERNETES
from fractional_gpu.protocol.pods import resource_of

if TYPE_CHECKING:
    from fractional_gpu.engines.kubernetes import Cluster

_SEATS_S = 10.0  # seats are compared with pods at least so often: a broker without its ledger has forgotten them
_NOTES_S = 60.0  # how often pods are annotated
_LISTED_S = 60.0  # for the pods to be listed, with --once
_LEAST_S = 0.05


def run_kubernetes(
    options: argparse.Namespace,
    rules: AgentRules,
    every_ms: int,
    say: Callable[[str], None],
) -> int:
    """Run the agent until SIGTERM or SIGINT, or once. Raises UsageError, CommandError and FractionalGPUError."""
    pools = _pools(options)
    try:
        from fractional_gpu.engines.kubernetes import Cluster, KubernetesEngine, configuration  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise CommandError(
            f"the agent of a Kubernetes node needs more packages ({error}); run: pip install 'jupyter-fractional-gpu[kubernetes]'"
        ) from error
    node = options.node or socket_module.gethostname()
    with Cluster(configuration(options.kubeconfig), node, say) as cluster:
        engine = KubernetesEngine(cluster, node, tuple(pools))
        if options.remove:
            engine.remove()
            say(f"node {node}: its counts and its summary are removed; pods that run keep their seats")
            return 0

        def connect() -> SeatClient:
            return SeatClient(options.socket, timeout_s=10)

        seats = PodSeats(connect, say, hub_namespaces=options.hub_namespace or ())
        agent = Agent(
            engine,
            connect,
            # A pod that no node's count covers waits in the scheduler's queue: no count has to be open for it.
            replace(rules, counts={pool: resource_of(pool) for pool in pools}, refuses_beyond=False),
            is_ours=lambda seat: seat.workload is not None and seat.workload.engine == KUBERNETES,
            seed=zlib.crc32(node.encode()) << 16 ^ os.getpid(),
            say=say,
        )
        if options.once:
            _await_pods(cluster)
            seats.keep(cluster.pods())
            write = agent.once()
            shown = {"node": node, "counts": dict(write.counts), "summary": json.loads(write.summary)}
            counted = ", ".join(f"{name}: {count}" for name, count in sorted(write.counts.items()))
            print(json.dumps(shown) if options.json else f"node {node}: {counted}")
            return 0
        say(f"agent of node {node}: pools {', '.join(pools)}")
        with ending() as end:
            _Rounds(cluster, agent, seats, PodNotes(cluster.annotate_pod, say), connect).run(end, every_ms / 1000)
    say("ended; the counts stay as they are")
    return 0


class _Rounds:
    """What the agent does again and again: seats as soon as pods change, counts at their own pace, annotations now and then."""

    def __init__(
        self,
        cluster: "Cluster",
        agent: Agent,
        seats: PodSeats,
        notes: PodNotes,
        connect: Callable[[], SeatClient],
    ) -> None:
        self._cluster = cluster
        self._agent = agent
        self._seats = seats
        self._notes = notes
        self._connect = connect
        self._kept_s = self._noted_s = float("-inf")

    def run(self, end: Ending, every_s: float) -> None:
        while not end.is_set():
            self._keep_seats()
            pause_s = min(every_s, max(_LEAST_S, self._agent.step() / 1000))
            # A signal sets `end` only; it is seen after this pause.
            self._cluster.changed.wait(pause_s)

    def _keep_seats(self) -> None:
        now = time.monotonic()
        changed = self._cluster.changed.is_set()
        if changed:  # else a change that comes just now would be forgotten
            self._cluster.changed.clear()
        try:
            if changed or now - self._kept_s >= _SEATS_S:
                self._seats.keep(self._cluster.pods())
                self._kept_s = now
            if now - self._noted_s >= _NOTES_S or changed:
                with closing(self._connect()) as client:
                    self._notes.write(client, self._cluster.pods() or (), self._seats.outcomes)
                self._noted_s = now
        except FractionalGPUError:
            # The broker does not answer, which the agent's step says; the seats are compared again in the next round.
            self._kept_s = self._noted_s = float("-inf")


def _await_pods(cluster: "Cluster") -> None:
    end = time.monotonic() + _LISTED_S
    while cluster.pods() is None:
        cluster.changed.wait(_LEAST_S)
        if time.monotonic() > end:
            raise CommandError(f"the API server did not list this node's pods within {_LISTED_S:g} s")


def _pools(options: argparse.Namespace) -> list[str]:
    """Return the pools to count. Raises UsageError."""
    for word in options.pool or ():
        if "=" in word or not word:
            raise UsageError(
                f"--pool {word!r}: with --engine kubernetes a pool's name alone; its count is {resource_of('POOL')}"
            )
    return list(dict.fromkeys(options.pool or ["default"]))
