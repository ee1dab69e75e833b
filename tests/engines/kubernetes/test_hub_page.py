"""The hub's page of a Kubernetes cluster, by the real client against a strict stand-in. There was no cluster."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fractional_gpu.engines.engine import EngineError
from fractional_gpu.engines.pods import SUMMARY
from fractional_gpu.protocol.nodes import STALE_S, NodeSummary, PoolSummary, encode_summary
from fractional_gpu_hub.engines.kubernetes_cluster import ClusterScope, read_from
from fractional_gpu_hub.service import cluster
from fractional_gpu_hub.service.cluster import Cluster, ClusterFollower
from tests.engines.kubernetes.api_server import ApiServer
from tests.engines.kubernetes.conftest import rules_of, settings_for
from tests.engines.kubernetes.pods import pod_of
from tests.hub.test_cluster_page import news
from tests.hub.test_service_usage import service

WHERE = ClusterScope(namespace="jhub")
LABELS = {"fractional-gpu.jupyter.org/node": "true"}
KUBESPAWNERS = {
    "apiGroups": [""],
    "resources": ["pods", "persistentvolumeclaims", "secrets", "services"],
    "verbs": ["get", "watch", "list", "create", "delete"],
}
"""The rule of the hub's Role in the chart of Zero to JupyterHub."""
OF_THE_SPAWNER = Path(__file__).with_name("golden") / "pod-quarter.yaml"


@pytest.fixture
def api(hub: list[dict[str, Any]]) -> Iterator[ApiServer]:
    """An API server that gives the hub what the example's role gives, and KubeSpawner's rights in its namespace."""
    with ApiServer(rules_of(hub), {"jhub": [KUBESPAWNERS]}) as server:
        yield server
        assert server.defects == []


def summary_of(*, at_s: float | None = None, problem: str = "") -> dict[str, str]:
    """Return the annotation that a node's agent publishes."""
    pool = PoolSummary(
        name="default", devices=2, device_mib=81920, total_milli=2000, held_milli=250, admissible_milli=1750, waiting=3
    )
    when = int(time.time() if at_s is None else at_s)
    return {SUMMARY: encode_summary(NodeSummary(at_s=when, pools=[pool], problem=problem))}


def server_pod(number: int, user: str, milli: str | None = "250", **more: Any) -> dict[str, Any]:  # noqa: ANN401 - of `pod_of`
    """Return a pod as `kubespawner` creates one for a server."""
    pod = pod_of(number, milli, annotations={"hub.jupyter.org/username": user}, **more)
    pod["metadata"]["labels"] = {"app": "jupyterhub", "component": "singleuser-server"}
    pod["status"]["startTime"] = "2026-01-01T00:00:00Z"
    return pod


def waiting_pod(number: int, user: str) -> dict[str, Any]:
    """Return a pod that has no node yet."""
    pod = server_pod(number, user, "1k", phase="Pending")
    del pod["spec"]["nodeName"], pod["status"]["startTime"]
    pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return pod


async def read(api: ApiServer, where: ClusterScope = WHERE) -> Cluster:
    return await read_from(settings_for(api), where)


# -- what is read ------------------------------------------------------------------------------------------------------------


async def test_each_server_has_its_user_its_share_and_its_node(api: ApiServer) -> None:
    ours = yaml.safe_load(OF_THE_SPAWNER.read_text())
    ours["metadata"] |= {"namespace": "jhub", "uid": "1"}
    api.put({**ours, "spec": {**ours["spec"], "nodeName": "gpu-1"}, "status": {"phase": "Running"}})
    api.put(server_pod(2, "bob", None, node="gpu-2"))
    api.put(waiting_pod(3, "eve"))
    api.put(server_pod(4, "starts", phase="Pending"))
    leaving = server_pod(5, "leaves")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.put(leaving)
    api.put(server_pod(6, "two-and-a-half", "2500m"))
    for phase, number in (("Succeeded", 10), ("Failed", 11)):
        api.put(server_pod(number, "ended", phase=phase))
    api.put(server_pod(12, "elsewhere", namespace="other"))
    api.put(pod_of(13, annotations={"hub.jupyter.org/username": "no-server"}))
    found = {one.user: one for one in (await read(api)).servers}
    assert {user: (one.node, one.state, one.milli) for user, one in found.items()} == {
        "ada": ("gpu-1", "running", 250),
        "bob": ("gpu-2", "running", None),
        "eve": ("", "pending", 1000),
        "starts": ("gpu-1", "starting", 250),
        "leaves": ("gpu-1", "ending", 250),
        "two-and-a-half": ("gpu-1", "running", None),
    }
    assert found["ada"].identity == "pod jupyter-ada"
    assert found["ada"].since == ""
    assert all(found[user].since.split()[1] == "h" for user in ("bob", "eve"))


# -- rights and failures -----------------------------------------------------------------------------------------------------


async def test_the_roles_give_what_the_page_uses_and_nothing_else(api: ApiServer, hub: list[dict[str, Any]]) -> None:
    api.add_node("gpu-1", labels=LABELS, annotations=summary_of())
    api.put(server_pod(1, "ada"))
    await read(api)
    granted = {(verb, resource) for rule in rules_of(hub) for resource in rule["resources"] for verb in rule["verbs"]}
    assert granted == {("list", "nodes")}
    assert api.used - granted == {("list", "pods")}, "which KubeSpawner has, in its namespace"
    with pytest.raises(EngineError, match="list pods in the namespace other"):
        await read(api, ClusterScope(namespace="other"))


# -- the page ----------------------------------------------------------------------------------------------------------------


async def test_the_page_shows_nodes_servers_and_what_is_old_or_missing(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "EVERY_S", 0.05)
    api.add_node("gpu-1", labels=LABELS, annotations=summary_of())
    api.add_node("gpu-2", labels=LABELS, annotations=summary_of(at_s=time.time() - STALE_S - 60))
    api.add_node("gpu-3", labels=LABELS)
    api.put(server_pod(1, "ada"))
    api.put(server_pod(2, "bob"))
    follower = ClusterFollower(lambda: read(api))
    follower.start()
    try:
        async with service("/nowhere", monkeypatch, follower) as pages:
            await news(follower, lambda one: not one.problem)
            mine = (await pages.get("", "ada")).text
            assert "3 nodes, 0.5 of 4 GPUs held, 1.75 available now, 1 server of yours" in mine
            assert ("too old to rely on" in mine, "No agent has published its GPUs yet" in mine) == (True, True)
            assert ("pod jupyter-1" in mine, "pod jupyter-2" in mine, "bob" in mine) == (True, False, False)
            assert "pod jupyter-2" in (await pages.get("", "grace")).text
            api.rules.clear()
            await news(follower, lambda one: bool(one.problem))
            later = (await pages.get("", "ada")).text
            assert "the Kubernetes API refuses permission to list nodes (403: " in later
            assert "bind the ClusterRole jupyter-gpu-hub" in later
            assert "pod jupyter-1" in later, "the last figures stay"
    finally:
        await follower.close()
