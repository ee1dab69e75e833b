"""`jupyter gpu node agent` runs the node agent and handles its options, log and shutdown. In Kubernetes, it also updates pods' seats."""

import argparse
import json
import os
import select
import signal
import socket as socket_module
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from fractional_gpu.commands.node.options import add_node_options, counts_of, hook_settings
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.text import CommandError, UsageError, parse_argument, say
from fractional_gpu.core.units import parse_duration_ms
from fractional_gpu.engines.pods import resource_of
from fractional_gpu.host.wakeups import handling, signal_pipe
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import KUBERNETES, SLURM

if TYPE_CHECKING:
    from fractional_gpu.engines.agent import Agent, AgentRules
    from fractional_gpu.engines.kubernetes import KubernetesEngine
    from fractional_gpu.engines.pod_seats import PodSeats

_LEAST_EVERY_MS, _LEAST_LOOK_MS = 50, 100
EPILOG = """\
examples:
  jupyter gpu node agent --engine slurm                    on a node whose name in Slurm is its host name
  jupyter gpu node agent --engine slurm --node gpu07 --pool default=jgpu --pool big=jgpubig
  jupyter gpu node agent --engine slurm --once --json      write once, and show the result
  jupyter gpu node agent --engine kubernetes --node gpu07 --hub-namespace jhub
  jupyter gpu node agent --engine kubernetes --node gpu07 --remove --kubeconfig ~/.kube/config

In Slurm it sets the node's counts (`scontrol update nodename=... gres=jgpu:open:N,jgpu:closed:M`, thousandths of a GPU): open is what
jobs hold plus what the broker would still grant; the sum of open and closed never changes. The node's Extra gets a summary. The agent
writes changes, at most once every --floor, and reads the node's record every --look. If the broker is not responding, the count stays for
--patience, then drops to what is in use. It needs the right to update nodes: root, SlurmUser, or a Slurm operator.

In Kubernetes it patches the node's status: the extended resource fractional-gpu.jupyter.org/POOL in thousandths of a GPU, and an
annotation with the summary. It watches the node's pods and registers their shares with the broker. docs/kubernetes.md lists
the rights it needs; --remove removes what it wrote to the node.

SIGTERM stops it; the counts stay as they are.
"""


@contextmanager
def ending() -> Iterator[Callable[[float], bool]]:
    """Yield a function that sleeps for some seconds, or returns True early if SIGTERM or SIGINT arrives. Use it only in the main thread."""

    def note(_number: int, _frame: FrameType | None) -> None:
        """Do nothing. Python itself writes each signal's number to the pipe from `signal_pipe`."""

    with signal_pipe() as wakes, handling(dict.fromkeys((signal.SIGTERM, signal.SIGINT), note)):
        yield lambda seconds: bool(select.select([wakes], [], [], seconds)[0])


def configure(parser: Parser) -> None:
    parser.describe("Tell the cluster's engine how much more GPU this node's broker would grant.", EPILOG)
    parser.argument("--engine", None, "the cluster's engine", choices=(SLURM, KUBERNETES), required=True)
    parser.argument(
        "--node",
        "NAME",
        "the node's name in the engine (default: the host's short name; with kubernetes, its full name)",
    )
    add_node_options(parser)
    parser.argument(
        "--hub-namespace",
        "NAMESPACE",
        "Kubernetes: trust pods in this namespace to name their owner (repeatable, once per hub; default: none)",
        action="append",
    )
    parser.argument("--kubeconfig", "FILE", "Kubernetes: how to reach the API (default: this pod's service account)")
    parser.flag("--remove", "Kubernetes: remove the counts and summary from the node, then exit")
    parser.flag("--once", "write once, immediately, then exit")
    parser.flag("--json", "with --once: print what was written as one JSON object")
    for name, default, text in (
        ("--every", "2s", "how often to ask the broker"),
        ("--floor", "5s", "the minimum time between writes"),
        ("--jitter", "2s", "delay each change by a random part of this time"),
        ("--look", "30s", "how often to check the node's record for changes by others"),
        ("--patience", "2m", "how long to keep the last count if the broker is not responding"),
        ("--comment-every", "5m", "how often to write a job's figures to its AdminComment, or never"),
    ):
        parser.argument(name, "DURATION", f"{text} (default: {default})", default=default)


def run(options: argparse.Namespace) -> int:
    if options.json and not options.once:
        raise UsageError("--json can only be used with --once; a running agent writes its log to stderr")
    return _run_kubernetes(options) if options.engine == KUBERNETES else _run_slurm(options)


def _run_slurm(options: argparse.Namespace) -> int:
    given = {"--hub-namespace": options.hub_namespace, "--kubeconfig": options.kubeconfig, "--remove": options.remove}
    if named := [name for name, value in given.items() if value]:
        raise UsageError(f"{', '.join(named)} can only be used with --engine {KUBERNETES}")
    from fractional_gpu.client.seat import SeatClient  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.agent import Agent  # noqa: PLC0415 - as above
    from fractional_gpu.engines.job_keeper import JobKeeper, KeeperRules  # noqa: PLC0415 - as above
    from fractional_gpu.engines.job_seats import job_of  # noqa: PLC0415 - as above
    from fractional_gpu.engines.slurm import OPEN, Slurm  # noqa: PLC0415 - as above

    node = options.node or socket_module.gethostname().partition(".")[0]
    counts = counts_of(options.pool)
    rules, every_ms = (
        _rules(options, counts, asked={pool: f"{count}:{OPEN}" for pool, count in counts.items()}),
        _every_ms(options),
    )
    look_ms = rules.look_ms
    comments = None if options.comment_every == "never" else _duration(options.comment_every, "--comment-every")
    slurm = Slurm(node)
    keeper_rules = KeeperRules(jobs_ms=2 * look_ms, young_ms=look_ms, comment_ms=comments)
    keeper = JobKeeper(slurm, hook_settings(options), keeper_rules, _say)
    agent = Agent(
        slurm,
        lambda: SeatClient(options.socket, timeout_s=10),
        rules,
        is_ours=lambda seat: job_of(seat) is not None,
        seed=_seed(node),
        say=_say,
        after_look=keeper.look,
    )
    if options.once:
        return _write_once(agent, node, options)
    _say(f"agent for node {node}: pools {', '.join(f'{pool} as {count}' for pool, count in counts.items())}")
    pause_s = 0.0
    with ending() as ended:
        while not ended(pause_s):
            pause_s = min(every_ms, max(_LEAST_EVERY_MS, agent.step())) / 1000
    _say("stopped; the counts stay as they are")
    return 0


def _seed(node: str) -> int:
    return zlib.crc32(node.encode()) << 16 ^ os.getpid()


def _write_once(agent: "Agent", node: str, options: argparse.Namespace) -> int:
    write = agent.once()
    shown = {"node": node, "counts": dict(write.counts), "summary": json.loads(write.summary)}
    counted = ", ".join(f"{name}:{count}" for name, count in sorted(write.counts.items())) or "no counts"
    print(json.dumps(shown) if options.json else f"node {node}: {counted}")
    return 0


def _rules(options: argparse.Namespace, counts: dict[str, str], **more: Any) -> "AgentRules":  # noqa: ANN401 - fields
    from fractional_gpu.core.nodes import PacingRules  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.agent import AgentRules  # noqa: PLC0415 - as above

    pacing = PacingRules(floor_ms=_duration(options.floor, "--floor"), jitter_ms=_duration(options.jitter, "--jitter"))
    return AgentRules(
        counts=counts,
        pacing=pacing,
        look_ms=max(_LEAST_LOOK_MS, _duration(options.look, "--look")),
        patience_ms=_duration(options.patience, "--patience"),
        **more,
    )


def _every_ms(options: argparse.Namespace) -> int:
    return max(_LEAST_EVERY_MS, _duration(options.every, "--every"))


def _duration(text: str, name: str) -> int:
    return parse_argument(parse_duration_ms, text, name)


def _say(line: str) -> None:
    say(line, sys.stderr, flush=True)


_SEATS_S = 10.0  # how often seats are compared with pods at least, as a broker may lose its ledger
_NOTES_S = 60.0  # how often pods are annotated
_LISTED_S = 60.0  # how long --once waits for the list of pods


def _run_kubernetes(options: argparse.Namespace) -> int:
    import asyncio  # noqa: PLC0415 - not for the Prolog

    from fractional_gpu.client.seat import SeatClient  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.agent import Agent  # noqa: PLC0415 - as above
    from fractional_gpu.engines.pod_seats import PodSeats  # noqa: PLC0415 - as above

    pools, every_s = _pools(options), _every_ms(options) / 1000
    # A pod that fits into no node's count waits in the scheduler's queue, so no count has to be kept open for it.
    rules = _rules(options, {pool: resource_of(pool) for pool in pools}, refuses_beyond=False)
    try:
        from fractional_gpu.engines.kubernetes import KubernetesEngine, configuration  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise CommandError(
            f"the agent needs more packages for Kubernetes ({error}); run: pip install 'jupyter-fractional-gpu[kubernetes]'"
        ) from error
    node, file = options.node or socket_module.gethostname(), options.kubeconfig
    remedy = "run the agent in a pod with a service account, or give --kubeconfig FILE"
    settings = asyncio.run(configuration(file, in_pod=file is None, remedy=remedy))
    with KubernetesEngine(settings, node, pools, _say) as engine:
        if options.remove:
            engine.remove()
            _say(f"node {node}: removed its counts and summary; running pods keep their seats")
            return 0

        def connect() -> SeatClient:
            return SeatClient(options.socket, timeout_s=10)

        seats = PodSeats(connect, _say, engine.annotate_pod, hub_namespaces=options.hub_namespace or ())
        agent = Agent(
            engine,
            connect,
            rules,
            is_ours=lambda seat: seat.workload is not None and seat.workload.engine == KUBERNETES,
            seed=_seed(node),
            say=_say,
        )
        if options.once:
            _await_pods(engine)
            seats.keep(engine.pods())
            return _write_once(agent, node, options)
        _say(f"agent for node {node}: pools {', '.join(pools)}")
        with ending() as ended:
            _keep_pods(engine, agent, seats, ended, every_s)
    _say("stopped; the counts stay as they are")
    return 0


def _keep_pods(
    engine: "KubernetesEngine",
    agent: "Agent",
    seats: "PodSeats",
    ended: Callable[[float], bool],
    every_s: float,
) -> None:
    """Run the agent until `ended` returns True. Update pods' seats and annotations at regular intervals and whenever pods change."""
    kept_s = noted_s = float("-inf")
    while not ended(0):
        now, changed = time.monotonic(), engine.changed.is_set()
        if changed:  # cleared before the pods are read, because a change in between would be lost otherwise
            engine.changed.clear()
        try:
            if changed or now - kept_s >= _SEATS_S:
                seats.keep(engine.pods())
                kept_s = now
            if changed or now - noted_s >= _NOTES_S:
                seats.note(engine.pods() or ())
                noted_s = now
        except FractionalGPUError:
            # The broker does not answer, which the agent's step reports. The next round compares the seats again.
            kept_s = noted_s = float("-inf")
        engine.changed.wait(min(every_s, max(_LEAST_EVERY_MS, agent.step()) / 1000))


def _await_pods(engine: "KubernetesEngine") -> None:
    end = time.monotonic() + _LISTED_S
    while engine.pods() is None:
        engine.changed.wait(_LEAST_EVERY_MS / 1000)
        if time.monotonic() > end:
            raise CommandError(f"the API server did not list this node's pods within {_LISTED_S:g} s")


def _pools(options: argparse.Namespace) -> list[str]:
    for word in options.pool or ():
        if "=" in word or not word:
            raise UsageError(
                f"--pool {word!r}: with --engine kubernetes, give only the pool's name; its resource is {resource_of('POOL')}"
            )
    return list(dict.fromkeys(options.pool or ["default"]))
