"""The pods that the spawner creates: golden manifests, valid for two versions of Kubernetes, without privileges. There was no cluster."""

import asyncio
import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import yaml
from kubernetes_asyncio import client
from tornado.web import HTTPError
from traitlets.config import Config

from fractional_gpu.protocol.nodes import NodeSummary, PoolSummary, encode_summary
from fractional_gpu_hub.engines.kubernetes import FractionalGPUKubeSpawner
from fractional_gpu_hub.engines.kubernetes_cluster import ClusterScope
from tests.engines.kubernetes.api_server import validate
from tests.support.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")
RESOURCE = "fractional-gpu.jupyter.org/default"


def node_of(
    name: str = "gpu-1", *, summary: str | None = None, ready: str = "True", cordoned: bool = False
) -> dict[str, Any]:
    """Return a node with a summary, as the agent publishes it."""
    pool = PoolSummary(
        name="default",
        devices=2,
        device_mib=81920,
        total_milli=2000,
        held_milli=250,
        admissible_milli=3000,
        fraction_milli=250,
        fractions_milli=[125, 250, 500, 1000],
        count=RESOURCE,
    )
    text = summary if summary is not None else encode_summary(NodeSummary(at_s=2**31 - 1, pools=[pool]))
    return {
        "metadata": {"name": name, "uid": name, "annotations": {"fractional-gpu.jupyter.org/summary": text}},
        "spec": {"unschedulable": cordoned},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


class Api:
    """The only part of the API that the spawner uses: nodes."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.nodes = list(nodes)
        self.asked: list[str] = []
        self.status = 200
        self.error: Exception | None = None

    async def list_node(self, *, label_selector: str, **_: object) -> "Api":
        self.asked.append(label_selector)
        if self.error is not None:
            raise self.error
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def read(self) -> bytes:
        return json.dumps({"metadata": {}, "items": self.nodes, "message": "busy"}).encode()


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the spawner from looking for a cluster's address during construction."""
    monkeypatch.setattr("kubespawner.spawner.load_config", lambda **_: None)
    monkeypatch.setattr("kubespawner.spawner.shared_client", lambda _: None)


@pytest.fixture
def api() -> Api:
    return Api(node_of())


class _User(SimpleNamespace):
    """A user of the hub."""


def spawner_of(api: Api, settings: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - untyped
    """Return a spawner of the user `ada`, with KubeSpawner's and our settings."""
    user = _User(name="ada", id=7, url="/user/ada/", groups=[], escaped_name="ada")
    given = Config({"KubeSpawner": settings or {}})
    hub = SimpleNamespace(
        public_host="", url="http://hub:8081/hub/", base_url="/hub/", api_url="http://hub:8081/hub/api"
    )
    spawner = FractionalGPUKubeSpawner(
        _mock=True,
        config=given,
        user=user,
        hub=hub,
        orm_spawner=SimpleNamespace(state=None, user_options=None, name="", server=None),
        api_token="t",  # noqa: S106 - of no hub
    )
    spawner.api = api
    FractionalGPUKubeSpawner._gpu_readers.clear()
    return spawner


async def pod_for(spawner: Any, options: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - untyped
    """Return the pod of a server with these options, checked against the schemas."""
    if spawner.gpu_in_profiles:
        spawner.user_options = options
        await spawner.load_user_options()
    choice = spawner.gpu_choice(options)
    if not choice.without:
        await spawner.gpu_take(choice)
    await spawner.gpu_prepare()
    pod = await spawner.get_pod_manifest()
    found: dict[str, Any] = client.ApiClient.sanitize_for_serialization(_serialiser(), pod)
    found = json.loads(json.dumps(found))
    validate(found)
    return found


def _serialiser() -> Any:  # noqa: ANN401 - only what the method needs of a client
    serialiser = client.ApiClient.__new__(client.ApiClient)
    serialiser.configuration = client.Configuration()
    return serialiser


ZERO_TO_JUPYTERHUB: dict[str, Any] = {
    "image": "registry.example.org/jupyter-gpu-singleuser:0.1.0",
    "cmd": ["jupyterhub-singleuser"],
    "cpu_guarantee": 0.5,
    "mem_guarantee": "1G",
    "fs_gid": 100,
    "uid": 1000,
    "volumes": {"home": {"name": "home", "persistentVolumeClaim": {"claimName": "claim-{username}"}}},
    "volume_mounts": {"home": {"name": "home", "mountPath": "/home/jovyan"}},
    "extra_labels": {"hub.jupyter.org/network-access-hub": "true"},
}


@pytest.mark.parametrize(
    ("name", "settings", "options"),
    [
        ("quarter", ZERO_TO_JUPYTERHUB, {"pool": "default", "fraction": "1/4"}),
        ("without", ZERO_TO_JUPYTERHUB, {"fraction": "none"}),
        (
            "plain-whole",
            {"image": "i", "gpu_first_uid": 0, "gpu_runtime_class": ""},
            {"pool": "default", "fraction": "1"},
        ),
    ],
)
async def test_pods_are_as_the_golden_manifests(
    api: Api, name: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    pod = await pod_for(spawner_of(api, settings), options)
    for name_of_version in ("jupyterhub", "kubespawner"):  # the installed version's
        del pod["metadata"]["annotations"][f"hub.jupyter.org/{name_of_version}-version"]
    check_golden(GOLDEN / f"pod-{name}.yaml", yaml.safe_dump(pod, sort_keys=True))


async def test_a_share_is_counted_once_in_requests_and_limits_and_its_saved_state_fits(api: Api) -> None:
    pod = await pod_for(
        spawner_of(api, {"mem_limit": "1G", "mem_guarantee": "1G"}), {"pool": "default", "fraction": "1/4"}
    )
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"][RESOURCE] == resources["requests"][RESOURCE] == "250"
    base_and_cap = (2048 + 81920 // 4) * 2**20
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == str(base_and_cap)
    pod = await pod_for(spawner_of(api, {"mem_limit": "512G"}), {"pool": "default", "fraction": "1/4"})
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == str(512 * 2**30), "a larger limit stays"


async def test_two_users_have_two_uids_and_no_token_is_in_a_pod(api: Api) -> None:
    pod = await pod_for(spawner_of(api, ZERO_TO_JUPYTERHUB), {"pool": "default", "fraction": "1/4"})
    context = pod["spec"]["containers"][0]["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["runAsNonRoot"]) == (200_007, 100, True)
    assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]})
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "hostPID" not in pod["spec"]
    assert "hostNetwork" not in pod["spec"]
    mounts = [
        mount for mount in pod["spec"]["containers"][0]["volumeMounts"] if mount["mountPath"] == "/run/jupyter-gpu"
    ]
    assert mounts == [{"mountPath": "/run/jupyter-gpu", "name": "jupyter-gpu-run", "readOnly": True}]
    named = {variable["name"]: variable.get("value") for variable in pod["spec"]["containers"][0]["env"]}
    assert "JUPYTER_GPU_SEAT_FILE" not in named
    assert named["CUDA_VISIBLE_DEVICES"] == "", "no GPU is visible but through a lease"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"privileged": True}, "privileged: true"),
        ({"extra_pod_config": {"hostPID": True}}, "hostPID: true"),
        ({"extra_pod_config": {"hostNetwork": True}}, "hostNetwork: true"),
        ({"extra_pod_config": {"hostIPC": True}}, "hostIPC: true"),
        ({"gpu_first_uid": 0, "uid": 0}, "runAsUser: 0"),
        ({"container_security_context": {"capabilities": {"add": ["SYS_ADMIN"]}}}, "the capabilities SYS_ADMIN"),
        ({"extra_containers": [{"name": "x", "image": "i", "securityContext": {"privileged": True}}]}, "container x"),
        ({"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}, "the host path /"),
        ({"volumes": [{"name": "x", "hostPath": {"path": "/var/lib/jupyter-gpu"}}]}, "/var/lib/jupyter-gpu"),
        ({"volumes": [{"name": "x", "hostPath": {"path": "/run/containerd/containerd.sock"}}]}, "containerd"),
    ],
)
async def test_a_setting_that_makes_users_administrators_of_the_node_stops_the_spawn(
    api: Api, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(HTTPError) as caught:
        await pod_for(spawner_of(api, {"image": "i", **settings}), {"pool": "default", "fraction": "1/4"})
    assert what in str(caught.value.log_message or caught.value)


# -- options ---------------------------------------------------------------------------------------------------------------


PROFILES: list[dict[str, Any]] = [
    {"display_name": "No GPU", "slug": "none"},
    {"display_name": "1/4 GPU", "slug": "quarter", "kubespawner_override": {"gpu_profile": "default/250"}},
]


async def test_profiles_may_decide_the_gpu(api: Api) -> None:
    settings = {"gpu_in_profiles": True, "profile_list": PROFILES}
    pod = await pod_for(
        spawner_of(api, copy.deepcopy(settings)), {"profile": "quarter", "fraction": "1", "pool": "default"}
    )
    assert pod["spec"]["containers"][0]["resources"]["limits"][RESOURCE] == "250", (
        "what is sent beside a profile is nothing"
    )
    pod = await pod_for(spawner_of(api, copy.deepcopy(settings)), {"profile": "none"})
    assert (
        "limits" not in pod["spec"]["containers"][0]["resources"]
        or RESOURCE not in pod["spec"]["containers"][0]["resources"]["limits"]
    )
    form = await spawner_of(api, copy.deepcopy(settings)).get_options_form()
    assert "1/4 GPU" in form
    assert "gpu-choice" not in form


async def test_the_pools_fractions_are_offered_beside_profiles(api: Api) -> None:
    form = await spawner_of(api, {"profile_list": PROFILES[:1]}).get_options_form()
    assert "No GPU" in form
    assert 'value="default/250"' in form
    assert "20GiB" in form or "20 GiB" in form
    assert api.asked == ["fractional-gpu.jupyter.org/node=true"]


def test_the_page_of_the_cluster_reads_what_the_spawner_makes() -> None:
    where, traits = ClusterScope(namespace="jhub"), FractionalGPUKubeSpawner.class_traits()
    assert (where.nodes, where.component) == (
        traits["gpu_node_selector"].default_value,
        traits["component_label"].default_value,
    )


async def test_the_schedulers_reason_is_shown_while_a_pod_waits(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"message": "0/3 nodes are available: 3 Insufficient fractional-gpu.jupyter.org/default.", "type": "Warning"},
        {"message": "Pulling image", "type": "Normal"},
    ]
    told = [{**event, "lastTimestamp": f"12:0{number}", "eventTime": None} for number, event in enumerate(events)]
    monkeypatch.setattr(FractionalGPUKubeSpawner, "events", told)
    spawner = spawner_of(api)

    async def watching() -> None:
        """Replace the watch of events."""

    spawner._start_watching_events = watching
    spawner._start_future = asyncio.get_running_loop().create_future()
    spawner._start_future.set_result(None)
    await spawner.gpu_take(spawner.gpu_choice({"pool": "default", "fraction": "1/4"}))
    first, second = [sentence async for sentence in spawner.gpu_queue()]
    assert first.startswith(
        "No node has 1/4 GPU of pool default free right now. Your server is waiting in the cluster's queue"
    )
    assert "Insufficient fractional-gpu.jupyter.org/default" in first
    assert second.endswith("[Normal] Pulling image")
