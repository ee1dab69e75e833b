"""The example manifests: rendered by kustomize, valid for two versions of Kubernetes, with the fewest privileges. There was no cluster."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from traitlets.config import Config

from fractional_gpu import __version__
from fractional_gpu.config import load
from fractional_gpu.engines.pods import DOMAIN
from tests.engines.kubernetes.api_server import validate
from tests.engines.kubernetes.conftest import EXAMPLES
from tests.engines.kubernetes.images import arguments, names

pytestmark = pytest.mark.promise("pods")


@pytest.fixture(scope="module")
def pod(base: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of the DaemonSet's pods."""
    (found,) = [one for one in base if one["kind"] == "DaemonSet"]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in pod["containers"]}


def test_every_object_is_valid(
    base: list[dict[str, Any]],
    usage: list[dict[str, Any]],
    hub: list[dict[str, Any]],
    users: list[dict[str, Any]],
) -> None:
    everything = base + usage + hub + users
    for found in everything:
        validate(found)
    assert sorted({found["kind"] for found in everything}) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "DaemonSet",
        "Namespace",
        "NetworkPolicy",
        "ServiceAccount",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ]


def test_the_worker_alone_is_privileged(containers: dict[str, dict[str, Any]]) -> None:
    assert {name: bool(one["securityContext"].get("privileged")) for name, one in containers.items()} == {
        "broker": False,
        "worker": True,
        "agent": False,
    }
    for name in ("broker", "agent"):
        context = containers[name]["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert containers["broker"]["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE", "DAC_READ_SEARCH", "KILL"]
    assert "add" not in containers["agent"]["securityContext"]["capabilities"]
    assert all(one["securityContext"]["readOnlyRootFilesystem"] for one in containers.values())


def test_the_agent_alone_has_a_token_and_the_worker_no_path_of_the_host(
    pod: dict[str, Any], containers: dict[str, dict[str, Any]]
) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod.get("hostNetwork", False) is False
    mounted = {name: {mount["name"] for mount in one["volumeMounts"]} for name, one in containers.items()}
    assert {name for name, mounts in mounted.items() if "token" in mounts} == {"agent"}
    of_host = {volume["name"] for volume in pod["volumes"] if "hostPath" in volume}
    assert of_host == {"run", "state", "cgroup"}
    assert [mount["readOnly"] for mount in containers["broker"]["volumeMounts"] if mount["name"] == "cgroup"] == [True]
    assert mounted["worker"] & of_host == set()
    assert [mount["readOnly"] for mount in containers["agent"]["volumeMounts"] if mount["name"] == "run"] == [True]


def test_nothing_connects_to_the_daemon_sets_pods_and_they_connect_to_the_api_server_alone(
    base: list[dict[str, Any]],
) -> None:
    (policy,) = [one["spec"] for one in base if one["kind"] == "NetworkPolicy"]
    (daemons,) = [one["spec"]["template"] for one in base if one["kind"] == "DaemonSet"]
    assert policy["podSelector"]["matchLabels"].items() <= daemons["metadata"]["labels"].items()
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]
    assert policy["ingress"] == []
    (rule,) = policy["egress"]
    assert [port["port"] for port in rule["ports"]] == [443, 6443]
    probes = [one["readinessProbe"] for one in daemons["spec"]["containers"] if "readinessProbe" in one]
    assert probes
    assert all("exec" in probe for probe in probes), "the kubelet's probes need no port"


def test_users_may_mount_the_brokers_socket_and_no_other_path(
    base: list[dict[str, Any]], users: list[dict[str, Any]]
) -> None:
    """The expressions themselves are the API server's to evaluate."""
    policy, binding = users
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    (daemons,) = [one["spec"]["template"]["spec"] for one in base if one["kind"] == "DaemonSet"]
    (folder,) = [volume["hostPath"]["path"] for volume in daemons["volumes"] if volume["name"] == "run"]
    (paths, read_only, *_) = policy["spec"]["validations"]
    assert f"v.hostPath.path == '{folder}'" in paths["expression"]
    assert folder in read_only["message"]


@pytest.mark.parametrize("dockerfile", sorted(path.name for path in EXAMPLES.glob("Dockerfile*")))
def test_an_image_has_a_pinned_base_this_version_and_a_user_by_number(dockerfile: str) -> None:
    """`tests/run images` builds and runs them."""
    lines = (EXAMPLES / dockerfile).read_text().splitlines()
    given = arguments(dockerfile)
    tag = given["BASE"].rpartition(":")[2]
    assert re.match(r"\d+[.-]\d+[.-]\d+", tag), "a tag that does not move"
    assert given["DIGEST"] == "", "an administrator's choice"
    assert "FROM ${BASE}${DIGEST}" in lines
    assert given["VERSION"] == __version__, "`python -m docs._site.installing` changes it"
    assert names()[dockerfile].endswith(f":{__version__}"), "the manifests run what is built"
    users = [line.removeprefix("USER ") for line in lines if line.startswith("USER ")]
    assert users[-1] == ("0" if dockerfile == "Dockerfile" else "1000")
    assert not re.search(r"(?i)password|secret|token|api.?key", "\n".join(lines))


def test_broker_and_worker_meet_at_one_socket_that_only_they_have(
    pod: dict[str, Any], containers: dict[str, dict[str, Any]]
) -> None:
    (path,) = [word.partition("=")[2] for word in containers["broker"]["args"] if word.startswith("--worker-socket=")]
    assert f"--socket={path}" in containers["worker"]["args"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "worker"]
    assert "emptyDir" in volume
    for name in ("broker", "worker"):
        (mount,) = [mount for mount in containers[name]["volumeMounts"] if mount["name"] == "worker"]
        # A folder below the volume: all users may write to the volume's top, which the worker refuses.
        assert Path(path).parent.parent == Path(mount["mountPath"])
    assert "worker" not in {mount["name"] for mount in containers["agent"]["volumeMounts"]}


def test_all_mounts_have_volumes_and_rights_are_bound_to_the_pods_account(
    base: list[dict[str, Any]], pod: dict[str, Any]
) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == volumes
    (binding,) = [one for one in base if one["kind"] == "ClusterRoleBinding"]
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (pod["serviceAccountName"], "jupyter-gpu")
    configs = {one["metadata"]["name"] for one in base if one["kind"] == "ConfigMap"}
    assert {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume} == configs


def test_the_brokers_settings_are_valid(base: list[dict[str, Any]], tmp_path: Path) -> None:
    (config,) = [one for one in base if one["kind"] == "ConfigMap"]
    (tmp_path / "jupyter_gpu_config.py").write_text(config["data"]["jupyter_gpu_config.py"])
    settings = load(str(tmp_path / "jupyter_gpu_config.py"), {})
    assert settings.seats_required
    assert settings.idle_exit is None
    assert [pool.name for pool in settings.pools] == ["default"]


def test_the_hubs_values_set_up_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = yaml.safe_load((EXAMPLES / "zero-to-jupyterhub.yaml").read_text())
    (variable,) = values["hub"]["extraEnv"]
    monkeypatch.setenv(variable, "10.1.2.3")
    program = tmp_path / "extra.py"
    program.write_text(values["hub"]["extraConfig"]["fractionalGPU"])
    c = Config()
    c.JupyterHub.services, c.JupyterHub.load_roles = [], []
    c.KubeSpawner.namespace = "jhub"  # the chart's configuration comes first
    runpy.run_path(str(program), {"c": c})
    assert c.JupyterHub.spawner_class == "fractional-gpu-kubernetes"
    assert values["singleuser"]["image"]["name"]
    (page,) = c.JupyterHub.services
    ((opened,),) = [rule["ports"] for rule in values["hub"]["networkPolicy"]["ingress"]]
    assert page["url"] == f"http://10.1.2.3:{opened['port']}", "the proxy, in another pod, reaches the page"
    assert page["environment"]["JUPYTER_GPU_PAGE_NAMESPACE"] == "jhub"
    assert json.dumps(c, default=repr).count(DOMAIN) == 0, "the domain's names are the spawner's business"
