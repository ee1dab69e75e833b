"""The agent as a process: a real broker, real control groups of pods, the real client, and a stand-in for the API server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fractional_gpu.commands.main import main
from fractional_gpu.protocol.messages import ProgressKind
from fractional_gpu.protocol.nodes import parse_summary
from fractional_gpu.protocol.seats import SeatRequest
from tests.broker.live import LiveBroker, live_broker
from tests.engines.kubernetes.api_server import TOKEN, ApiServer
from tests.engines.kubernetes.conftest import NODE, rules_of
from tests.engines.kubernetes.pods import pod_of
from tests.engines.kubernetes.test_pod_seats import Node, kernel_in, lease_in
from tests.support.paths import PYTHONPATH
from tests.support.world import until

RESOURCE = "fractional-gpu.jupyter.org/default"
SUMMARY = "fractional-gpu.jupyter.org/summary"
POOLS: dict[str, Any] = {"default": {"wait_bound": "100%", "kernels_per_seat": 8, "oversubscription": 2}}


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker(pools=POOLS, seats_required=True) as live:
        yield live


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path) -> str:
    """A kubeconfig file for the stand-in."""
    path = tmp_path / "config"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "agent"}}],
        "clusters": [{"name": "it", "cluster": {"server": server.url}}],
        "users": [{"name": "agent", "user": {"token": TOKEN}}],
    }
    path.write_text(json.dumps(content))
    return str(path)


def words(live: LiveBroker, kubeconfig: str, *more: str) -> list[str]:
    """Return the agent's command line."""
    return [
        *("node", "agent", "--engine", "kubernetes", "--node", NODE, "--socket", live.socket),
        *("--kubeconfig", kubeconfig, "--hub-namespace", "jhub", *more),
    ]


def capacity(server: ApiServer) -> str | None:
    """Return the node's count of thousandths."""
    found: str | None = server.nodes[NODE]["status"]["capacity"].get(RESOURCE)
    return found


def test_once_registers_the_pods_and_writes_the_counts(
    live: LiveBroker, server: ApiServer, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.put(pod_of(1, "250", annotations={"fractional-gpu.jupyter.org/owner": "ada"}))
    assert main(words(live, kubeconfig, "--once", "--json")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["counts"] == {RESOURCE: shown["counts"][RESOURCE]}
    assert shown["counts"][RESOURCE] >= 250
    (seat,) = Node(live).listed().values()
    assert (seat.owner, seat.fraction_milli) == ("ada", 250)
    summary = parse_summary(server.nodes[NODE]["metadata"]["annotations"][SUMMARY])
    assert [(pool.name, pool.held_milli) for pool in summary.pools] == [("default", 250)]
    assert main(words(live, kubeconfig, "--remove")) == 0
    assert capacity(server) is None
    assert Node(live).listed(), "a pod that runs keeps its seat"


def test_a_node_that_is_full_of_others_servers_admits_no_pod(
    live: LiveBroker, server: ApiServer, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hub outside Kubernetes may have seats at the same broker. A pod then waits in the scheduler's queue."""
    with Node(live).client() as client:
        for number in range(2):
            request = SeatRequest(owner=f"user-{number}", pool="default", fraction_milli=1000)
            assert [line.kind for line in client.take_seat(request)][-1] == ProgressKind.GRANTED
    assert main(words(live, kubeconfig, "--once")) == 0
    assert capsys.readouterr().out == f"node {NODE}: {RESOURCE}:0\n"
    assert capacity(server) == "0"


def test_an_agent_lives_with_its_pods_and_ends_in_order(
    live: LiveBroker, server: ApiServer, kubeconfig: str, usage: list[dict[str, Any]], tmp_path: Path
) -> None:
    server.rules += rules_of(usage)
    uid = str(uuid4())
    pod = pod_of(1, "500", annotations={"fractional-gpu.jupyter.org/owner": "ada"})
    pod["metadata"]["uid"] = uid
    log = tmp_path / "agent.log"
    node = Node(live)
    quick = ("--every", "50ms", "--floor", "50ms", "--jitter", "1ms", "--look", "100ms")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fractional_gpu.commands.main", *words(live, kubeconfig, *quick)],
            stderr=errors,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )
    try:
        free = until(lambda: capacity(server), "the node has its count")
        with kernel_in(live, uid) as client:
            server.put(pod)
            until(lambda: node.listed().get(uid), "the pod has its seat")
            status, lease = lease_in(client)
            assert status == 200, lease
            annotations = server.pods["jhub/jupyter-1"]["metadata"]["annotations"]
            until(
                lambda: (
                    "granted: 500"
                    in server.pods["jhub/jupyter-1"]["metadata"]["annotations"].get(
                        "fractional-gpu.jupyter.org/seat", ""
                    )
                ),
                f"the pod is told: {annotations}",
            )
            # An administrator, or a kubelet that registers its node again, sets the count to 0: the agent restores it.
            server.nodes[NODE]["status"]["capacity"][RESOURCE] = "0"
            until(lambda: capacity(server) not in ("0", None), "the count is written again")
            server.delete("jhub/jupyter-1")
            until(lambda: uid not in node.listed(), "the seat has ended with the pod")
        until(lambda: capacity(server) == free, "the count is as before")
        process.terminate()
        assert process.wait(60) == 0
        assert capacity(server) == free, "the counts stay as they are"
        assert "stopped; the counts stay as they are" in log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--pool", "default=jgpu"), "give only the pool's name; its resource is fractional-gpu.jupyter.org/POOL"),
        (("--kubeconfig", "/nowhere/config"), "with /nowhere/config"),
    ],
)
def test_what_the_agent_cannot_use_is_one_line(
    server: ApiServer, more: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["node", "agent", "--engine", "kubernetes", "--node", NODE, *more])
    complaint = capsys.readouterr().err
    assert code in (1, 2)
    assert sentence in complaint
    assert len(complaint.splitlines()) == 1
    assert server.requests == []
