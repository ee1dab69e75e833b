"""Runs servers as Kubernetes pods, based on `jupyterhub-kubespawner`. The chosen share is requested as an extended resource.

- The pod requests `fractional-gpu.jupyter.org/POOL` in milli-GPU, and memory for the server and for saved GPU memory. The scheduler
  accounts for the share, the node's agent registers it as a seat, and the node's broker chooses the device.
- The manifest is finalised after `kubespawner` has built it, so no profile or `extra_pod_config` can add a share or a privilege.
- A pod with a share is unprivileged: it does not run as root, and has no added capabilities or host namespaces. Any setting that would
  grant a privilege stops the spawn.
- The broker's socket folder is mounted read-only. No secret is mounted, because the broker identifies pods by their control groups.
- Each user's pods run under a separate uid, so the broker can prevent users from accessing each other's leases.
"""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar, Final

from kubernetes_asyncio import client
from kubespawner import KubeSpawner
from traitlets import Bool, Int, Unicode, default

from fractional_gpu.engines import pods
from fractional_gpu.engines.kubernetes import Page, listed
from fractional_gpu.engines.pods import Node
from fractional_gpu_hub.engines.kubernetes_cluster import LIST_NODES, node_of
from fractional_gpu_hub.engines.offers import ClusterNode, NodePool, NodeReader
from fractional_gpu_hub.engines.spawner import Allocation, EngineGPUMixin
from fractional_gpu_hub.options import Choice, options_of_form
from fractional_gpu_hub.seats import spawn_error

_VOLUME: Final = "jupyter-gpu-run"
_USERS: Final = 100  # the id of the group `users`, which owns the files in Jupyter's own images
_MIB: Final = 2**20


class FractionalGPUKubeSpawner(EngineGPUMixin, KubeSpawner):  # type: ignore[misc] # untyped
    """Runs servers as pods with shares of the nodes' GPUs. `docs/kubernetes.md` describes what the cluster needs."""

    api: Any
    namespace: str
    pod_name: str
    _start_future: Any

    gpu_socket: Unicode[str, str | bytes] = Unicode(
        "/run/jupyter-gpu/broker.sock",
        config=True,
        help="""The broker's socket on the nodes. Its folder is mounted read-only into pods with a share.

        Example: c.FractionalGPUKubeSpawner.gpu_socket = "/run/jupyter-gpu/broker.sock"
        """,
    )
    gpu_runtime_class: Unicode[str, str | bytes] = Unicode(
        "nvidia",
        config=True,
        help="""The RuntimeClass that gives pods with a share the driver's libraries and devices. "" means the cluster's default.

        Example: c.FractionalGPUKubeSpawner.gpu_runtime_class = ""
        """,
    )
    gpu_first_uid: Int[int, int] = Int(
        200_000,
        config=True,
        min=0,
        max=2**31 - 2**24,
        help="""Pods with a share run as this uid plus the user's id in the hub, so that the nodes' brokers see a separate uid for each
        user. With 0, pods run as the uid of the image or of `uid`, and the brokers cannot tell their users apart by uid.

        Example: c.FractionalGPUKubeSpawner.gpu_first_uid = 500000
        """,
    )
    gpu_node_selector: Unicode[str, str | bytes] = Unicode(
        "fractional-gpu.jupyter.org/node=true",
        config=True,
        help="""The labels of the nodes whose GPUs are offered.

        Example: c.FractionalGPUKubeSpawner.gpu_node_selector = "fractional-gpu.jupyter.org/node=true,zone=a"
        """,
    )
    gpu_in_profiles: Bool[bool, bool | int] = Bool(
        default_value=False,
        config=True,
        help="""Whether users choose a GPU through a profile in `profile_list` whose `kubespawner_override` sets `gpu_profile`. The spawn
        page then offers no other way to choose a GPU.

        Example: c.FractionalGPUKubeSpawner.gpu_in_profiles = True
        """,
    )
    gpu_profile: Unicode[str, str | bytes] = Unicode(
        "none",
        config=True,
        help="""A profile's GPU share, as POOL/THOUSANDTHS, or `none`. Set it in `kubespawner_override`, and set `gpu_in_profiles`.

        Example: c.KubeSpawner.profile_list = [{"display_name": "1/4 GPU", "kubespawner_override": {"gpu_profile": "default/250"}}]
        """,
    )

    _gpu_progress_below = False  # `gpu_queue` includes it
    _gpu_readers: ClassVar[dict[str, NodeReader[ClusterNode]]] = {}  # by label selector

    @default("allow_privilege_escalation")
    def _gpu_allow_privilege_escalation_default(self) -> bool:
        return False

    async def gpu_nodes(self) -> Sequence[NodePool]:
        """Return the pools of all nodes, as published by the nodes' agents. Raises EngineError."""
        selector = self.gpu_node_selector
        reader = self._gpu_readers.setdefault(selector, NodeReader(lambda: self._gpu_list(selector)))
        nodes = await reader.read(self.gpu_nodes_cache)
        return [pool for node in nodes for pool in node.pools]

    async def _gpu_list(self, selector: str) -> list[ClusterNode]:
        found, _ = await listed(self.api.list_node, Page[Node], *LIST_NODES, label_selector=selector)
        nodes = [node_of(node) for node in found]
        for node in nodes:
            if node.problem:
                self.log.warning("Node %s: %s", node.name, node.problem)
        return nodes

    async def get_options_form(self) -> str:
        """Return the form with the profiles, including the GPU choice unless `gpu_in_profiles` is set."""
        if self.gpu_in_profiles:
            return str(await KubeSpawner.get_options_form(self) or "")
        return await super().get_options_form()

    def gpu_choice(self, options: object) -> Choice:
        """Return the user's choice, or the profile's if `gpu_in_profiles` is set. Raises an HTTPError, which stops the spawn."""
        if not self.gpu_in_profiles:
            return super().gpu_choice(options)
        return super().gpu_choice(options_of_form({"gpu": [str(self.gpu_profile)]}))

    async def start(self) -> Any:  # noqa: ANN401 - as the spawner below
        """Start the server. If `gpu_in_profiles` is set, the profile determines its GPU share."""
        self._start_future = None  # the future of an earlier start would end `kubespawner`'s progress
        if self.gpu_in_profiles:
            await self.load_user_options()
        return await super().start()

    async def gpu_queue(self) -> AsyncGenerator[str, None]:
        """Yield the pod's events while it starts. The event for a lack of free GPU shares is rewritten in plain English."""
        async with contextlib.aclosing(KubeSpawner.progress(self)) as events:
            async for event in events:
                message = str(event.get("message", ""))
                if f"Insufficient {pods.DOMAIN}/" in message:
                    message = (
                        f"No node has {self._gpu_words()} free right now. Your server is waiting in the cluster's queue and will "
                        f"start as soon as one does ({message})"
                    )
                yield message

    async def get_pod_manifest(self) -> Any:  # noqa: ANN401 - as in kubespawner
        """Return the pod's manifest with the chosen share. Raises an HTTPError to stop the spawn if the pod would be privileged."""
        pod = await super().get_pod_manifest()
        refuse_other_shares(pod)
        if self.gpu_allocation is None:
            return pod
        self._gpu_give_share(pod, self.gpu_allocation)
        if wrong := privilege_of(pod):
            raise spawn_error(
                f"this hub's settings give users' pods {wrong}, which would make every user an administrator of the node and its GPU "
                "broker; remove that from the settings of KubeSpawner and its profiles",
                reason="configuration",
            )
        return pod

    def _gpu_give_share(self, pod: Any, has: Allocation) -> None:  # noqa: ANN401 - V1Pod
        server = pod.spec.containers[0]
        pod.metadata.annotations = {
            **(pod.metadata.annotations or {}),
            pods.POOL: has.pool,
            pods.FRACTION: f"{has.fraction_milli}m",
            pods.OWNER: self.user.name,
            pods.SERVER: self.name,
        }
        _give_resources(server, has)
        _give_environment(server, has, self.gpu_socket)
        folder = str(PurePosixPath(self.gpu_socket).parent)
        source = client.V1HostPathVolumeSource(path=folder, type="Directory")
        volumes = [volume for volume in pod.spec.volumes or () if _field(volume, "name") != _VOLUME]
        pod.spec.volumes = [*volumes, client.V1Volume(name=_VOLUME, host_path=source)]
        mounts = [mount for mount in server.volume_mounts or () if _field(mount, "mount_path", "mountPath") != folder]
        server.volume_mounts = [*mounts, client.V1VolumeMount(name=_VOLUME, mount_path=folder, read_only=True)]
        if self.gpu_runtime_class and not pod.spec.runtime_class_name:
            pod.spec.runtime_class_name = self.gpu_runtime_class
        _restrict(pod, self.gpu_first_uid + int(self.user.id) if self.gpu_first_uid else None)


def refuse_other_shares(pod: Any) -> None:  # noqa: ANN401 - V1Pod
    """Raise an HTTPError to stop the spawn if the settings request shares, because only the GPU choice may do that."""
    for container in (*(pod.spec.init_containers or ()), *pod.spec.containers):
        resources = _field(container, "resources")
        for amounts in (_field(resources, "limits"), _field(resources, "requests")):
            if named := sorted(name for name in amounts or {} if pods.pool_of(name) is not None):
                raise spawn_error(
                    f"this hub's settings give container {_field(container, 'name')} {named[0]}; remove that, and let users choose a "
                    "GPU, or set gpu_profile in profiles",
                    reason="configuration",
                )


def _give_resources(server: Any, has: Allocation) -> None:  # noqa: ANN401 - V1Container
    limits, requests = dict(server.resources.limits or {}), dict(server.resources.requests or {})
    resource = pods.resource_of(has.pool)
    limits[resource] = requests[resource] = str(has.fraction_milli)
    # The saved memory of suspended kernels counts as memory of the pod. With a lower limit, the pod would be killed.
    needed = has.host_memory_mib * _MIB
    for amounts in (limits, requests):
        given = amounts.get("memory") or 0
        amounts["memory"] = str(max(needed, pods.whole_quantity(int(given) if isinstance(given, float) else given)))
    server.resources.limits, server.resources.requests = limits, requests


def _give_environment(server: Any, has: Allocation, socket: str) -> None:  # noqa: ANN401 - V1Container
    ours = {
        "JUPYTER_GPU_SOCKET": socket,
        "JUPYTER_GPU_POD_SHARE": f"{has.pool}/{has.fraction_milli}",  # determines which kernels the launcher shows
        "JUPYTER_GPU_DEFAULT_POOL": has.pool,
        "JUPYTER_GPU_DEFAULT_FRACTION": f"{has.fraction_milli}m",
        "CUDA_VISIBLE_DEVICES": "",
        "NVIDIA_VISIBLE_DEVICES": "all",  # the broker chooses the device of each kernel and may change it
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "MEM_LIMIT": server.resources.limits["memory"],
        "MEM_GUARANTEE": server.resources.requests["memory"],
    }
    others = [variable for variable in server.env or () if _field(variable, "name") not in ours]
    server.env = others + [client.V1EnvVar(name=name, value=value) for name, value in ours.items()]


def _restrict(pod: Any, uid: int | None) -> None:  # noqa: ANN401 - V1Pod
    """Apply Kubernetes' `restricted` pod security standard, except for the host path, so that the server is unprivileged."""
    context = dict(pod.spec.containers[0].security_context or {})  # a mapping, from kubespawner's configuration
    context["allowPrivilegeEscalation"] = False
    context["runAsNonRoot"] = True
    if uid is not None:
        context["runAsUser"], context["runAsGroup"] = uid, _USERS
    context["capabilities"] = {**(context.get("capabilities") or {}), "drop": ["ALL"]}
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    pod.spec.containers[0].security_context = context
    if pod.spec.automount_service_account_token is None:
        pod.spec.automount_service_account_token = False


def privilege_of(pod: Any) -> str:  # noqa: ANN401 - V1Pod
    """Return the first privilege found in the pod, as a field and its value, or "" if it has none."""
    for field, name in (("host_pid", "hostPID"), ("host_network", "hostNetwork"), ("host_ipc", "hostIPC")):
        if _field(pod.spec, field, name):
            return f"{name}: true"
    # Ignore init containers, because they have ended when the server starts, and the administrator has chosen what they run.
    for container in pod.spec.containers:
        context, name = _field(container, "security_context", "securityContext"), _field(container, "name")
        if _field(context, "privileged"):
            return f"privileged: true (container {name})"
        if added := _field(_field(context, "capabilities"), "add"):
            return f"the capabilities {', '.join(added)} (container {name})"
        if _field(context, "run_as_user", "runAsUser") == 0:
            return f"runAsUser: 0 (container {name})"
    for volume in pod.spec.volumes or ():
        path = _field(_field(volume, "host_path", "hostPath"), "path")
        if path and _field(volume, "name") != _VOLUME and _is_of_the_node(str(path)):
            return f"the host path {path}"
    return ""


def _is_of_the_node(path: str) -> bool:
    """Return whether a host path overlaps a sensitive one on the node, such as /proc, the broker's state or /run."""
    whole = PurePosixPath("/", path)
    places = ("/proc", "/sys", "/run", "/var/run", "/var/lib/jupyter-gpu", "/var/lib/kubelet", "/etc")
    # Check both directions, because /proc/1 is in /proc, and / contains /proc.
    return any(whole.is_relative_to(place) or PurePosixPath(place).is_relative_to(whole) for place in places)


def _field(found: Any, *names: str) -> Any:  # noqa: ANN401 - a model of the client, or a mapping from a configuration
    """Return the first of these fields that is set in `found`, a Kubernetes client model or a mapping. Return None if none is set."""
    for name in names:
        value = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
        if value is not None:
            return value
    return None
