"""The page of a cluster: what each user sees, and what it does when Slurm does not answer; how it looks is in test_service_browser.py."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import pytest
from traitlets.config import Config

from fractional_gpu.config import ConfigError
from fractional_gpu.engines.engine import EngineUnavailableError
from fractional_gpu.protocol.nodes import NodeSummary, PoolSummary, encode_summary
from fractional_gpu_hub.engines.kubernetes_cluster import ClusterScope
from fractional_gpu_hub.engines.offers import ClusterNode, NodePool
from fractional_gpu_hub.engines.slurm_cluster import cluster_of
from fractional_gpu_hub.engines.slurm_commands import parse_nodes
from fractional_gpu_hub.service import add_page, cluster
from fractional_gpu_hub.service.cluster import (
    Cluster,
    ClusterFollower,
    ClusterServer,
    ClusterSnapshot,
    cluster_view,
    reader_of,
)
from fractional_gpu_hub.service.views import Viewer
from tests.hub.test_service_usage import Service, service

pytestmark = pytest.mark.promise("accessibility")

NOW_S = 1_000_000.0


def pool(node: str, **more: object) -> NodePool:
    given: dict[str, object] = {
        "name": "default", "devices": 2, "device_mib": 81920, "total_milli": 2000, "held_milli": 1250, "admissible_milli": 750,
        "fractions_milli": [250], "waiting": 2, "wait_p50_ms": 3000, "wait_p95_ms": 20000, "at_s": NOW_S - 60, "simulated": True,
    }  # fmt: skip
    return NodePool(node=node, **{**given, **more})  # type: ignore[arg-type]


def cluster_at(now_s: float) -> Cluster:
    return Cluster(
        nodes=[
            ClusterNode(name="gpu01", state="in service", pools=[pool("gpu01", at_s=now_s - 60)]),
            ClusterNode(name="gpu02", state="drained", pools=[pool("gpu02", at_s=now_s - 60, why_not="drained")]),
            ClusterNode(name="gpu03", state="in service", pools=[pool("gpu03", at_s=now_s - 7200)]),
            ClusterNode(
                name="gpu04", state="in service", problem="the node's summary has version 2, this release reads 1"
            ),
        ],
        servers=[
            ClusterServer(identity="job 11", user="ada", node="gpu01", state="running", milli=250, since="1:02:03"),
            ClusterServer(identity="job 12", user="bob", node="", state="pending", milli=500, since="0:00"),
        ],
        others=3,
    )


CLUSTER = cluster_at(NOW_S)


def view(name: str = "ada", *, admin: bool = False, problem: str = "") -> dict[str, object]:
    viewer = Viewer(name=name, admin=admin)
    return cluster_view(ClusterSnapshot(cluster=CLUSTER, problem=problem), viewer, now_s=NOW_S)


# -- who sees what -----------------------------------------------------------------------------------------------------------


def test_a_user_sees_all_nodes_and_their_own_servers_an_administrator_all() -> None:
    mine, all_of_them = view(), view("grace", admin=True)
    assert "bob" not in json.dumps(mine)
    assert [row["owner"] for row in mine["servers"]] == ["ada"]  # type: ignore[attr-defined]
    assert [row["owner"] for row in all_of_them["servers"]] == ["ada", "bob"]  # type: ignore[attr-defined]
    assert mine["nodes"] == all_of_them["nodes"]
    assert mine["summary"] == (
        "4 nodes, 2.5 of 4 GPUs held, 0.75 available now, 1 server of yours, 3 more nodes without an agent"
    )


def test_a_node_says_what_it_has_and_how_old_that_is() -> None:
    rows = {row["name"]: row for row in view()["nodes"]}  # type: ignore[attr-defined]
    first = rows["gpu01"]
    assert (first["held"], first["free"], first["queue"]) == ("1.25 of 2 held", "0.75 GPUs at once", "2 kernels")
    assert first["note"] == "Published 1 min ago."
    assert (rows["gpu02"]["free"], rows["gpu02"]["state"]) == ("none", "drained")
    assert (rows["gpu03"]["free"], "too old to rely on" in rows["gpu03"]["note"]) == ("none", True)
    assert rows["gpu04"]["note"] == "The node's summary has version 2, this release reads 1"


def test_slurms_nodes_and_jobs_become_the_page() -> None:
    summary = NodeSummary(
        at_s=int(NOW_S),
        pools=[
            PoolSummary(name="a", devices=1, total_milli=1000, held_milli=250, admissible_milli=750, count="jgpu:open")
        ],
    )
    nodes = [
        f"NodeName=n1 State=MIXED Extra={encode_summary(summary)}",
        "NodeName=n2 State=IDLE",
        "NodeName=n3 State=DOWN* Extra={broken",
    ]
    jobs = "f00|7|RUNNING|n1|gres:jgpu:open:250|1:02|ada|jupyter-0a\nf00|8|RUNNING|n1|gres:gpu:1|1:02|bob|jupyter-0b"
    found = cluster_of(parse_nodes("\n".join(nodes)), jobs, "f00|")
    assert ([node.name for node in found.nodes], found.others) == (["n1", "n3"], 1)
    assert found.nodes[1].problem
    assert [(one.user, one.milli, one.state) for one in found.servers] == [
        ("ada", 250, "running"),
        ("bob", None, "running"),
    ]


# -- following ---------------------------------------------------------------------------------------------------------------


class Slurm:
    def __init__(self, there: Cluster = CLUSTER) -> None:
        self.reads = 0
        self.problem = ""
        self.there = there

    async def read(self) -> Cluster:
        self.reads += 1
        if self.problem:
            raise EngineUnavailableError(self.problem)
        return self.there


async def news(follower: ClusterFollower, is_there: Callable[[ClusterSnapshot], bool]) -> ClusterSnapshot:
    async with asyncio.timeout(60):
        while True:
            changed, snapshot = follower.changed, follower.snapshot
            if is_there(snapshot):
                return snapshot
            await changed.wait()


async def test_slurm_is_asked_only_while_a_page_is_open_and_its_last_word_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "EVERY_S", 0.01)
    slurm = Slurm()
    follower = ClusterFollower(slurm.read)
    follower.start()
    await asyncio.sleep(0)
    assert slurm.reads == 0
    assert (await news(follower, lambda one: not one.problem)).cluster == CLUSTER
    slurm.problem = "Slurm does not answer"
    stale = await news(follower, lambda one: bool(one.problem))
    assert (stale.cluster, stale.problem) == (CLUSTER, "Slurm does not answer")
    slurm.problem = ""
    await news(follower, lambda one: not one.problem)
    await follower.close()


# -- the page ----------------------------------------------------------------------------------------------------------------


async def with_page(monkeypatch: pytest.MonkeyPatch, work: Callable[[Service, Slurm], Awaitable[None]]) -> None:
    monkeypatch.setattr(cluster, "EVERY_S", 0.05)
    slurm = Slurm(cluster_at(time.time()))
    follower = ClusterFollower(slurm.read)
    follower.start()
    try:
        async with service("/nowhere", monkeypatch, follower) as pages:
            await news(follower, lambda one: not one.problem)
            await work(pages, slurm)
    finally:
        await follower.close()


async def test_the_page_is_for_users_with_the_scope_and_shows_no_names_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(pages: Service, _: Slurm) -> None:
        page = await pages.get("", "ada")
        assert (page.status, "gpu01" in page.text, "bob" in page.body) == (200, True, False)
        assert "bob" in (await pages.get("", "grace")).text
        assert "bob" not in (await pages.get("api/status", "ada")).body
        for user in ("nobody", "robot"):
            assert (await pages.get("", user)).status == 403
            assert (await pages.get("api/status", user)).status == 403
        assert (await pages.get("api/status", None)).status == 401
        for path in ("usage", "api/leases/x/story", "api/pools/default"):
            assert (await pages.get(path, "grace")).status == 404, "of a machine with a broker"

    await with_page(monkeypatch, look)


@pytest.mark.parametrize(
    ("engine", "environment"),
    [
        ("slurm", {"SLURM_CONF": "/etc/slurm/slurm.conf"}),
        ("kubernetes", {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}),
    ],
)
def test_the_page_of_a_cluster_needs_no_broker(
    monkeypatch: pytest.MonkeyPatch, engine: str, environment: dict[str, str]
) -> None:
    for name, value in {"UNRELATED": "x", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    c = hub_config()
    add_page(c, admins=["grace"], cluster=engine)
    (made,) = c.JupyterHub.services
    assert made["command"][-2:] == ["--cluster", engine]
    assert made["environment"] == environment
    with pytest.raises(ConfigError, match="expected slurm, kubernetes"):
        add_page(c, cluster="pbs")
    assert reader_of(engine).__module__ == f"fractional_gpu_hub.engines.{engine}_cluster"


def test_the_page_reads_where_the_kubernetes_spawner_starts_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    c = hub_config()
    c.KubeSpawner.namespace = "of-all-hubs"
    c.FractionalGPUKubeSpawner.namespace = "jhub"
    c.KubeSpawner.component_label = "second-hub"
    c.FractionalGPUKubeSpawner.gpu_node_selector = "zone=a"
    add_page(c, cluster="kubernetes", host="10.1.2.3", port=8889)
    add_page(c, cluster="kubernetes", host="fd00::7", name="again")
    made, again = c.JupyterHub.services
    assert (made["url"], again["url"]) == ("http://10.1.2.3:8889", "http://[fd00::7]:10190")
    assert ClusterScope.of(made["environment"]) == ClusterScope(
        namespace="jhub", nodes="zone=a", component="second-hub"
    )
    c.KubeSpawner.enable_user_namespaces = True
    with pytest.raises(ConfigError, match="reads the pods of one namespace"):
        add_page(c, cluster="kubernetes")
    with pytest.raises(ConfigError, match=r"add_page\(host='hub'\): expected an address"):
        add_page(c, host="hub")


def hub_config() -> Config:
    c = Config()
    c.JupyterHub.services, c.JupyterHub.load_roles = [], []
    return c
