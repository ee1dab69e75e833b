"""Adds the page to the hub's configuration: a managed service, two scopes, and the roles that grant them.

Users with the scope `custom:fractional-gpu:read` (all users, unless `everybody` is False) see the totals for each device and their own
kernels, which they can suspend, resume and pin. Users with `custom:fractional-gpu:admin` see and control everything. Only the users and
groups named in `add_page` get this scope; the hub's administrators do not get it automatically.
"""

import ipaddress
import os
import sys
from collections.abc import Sequence
from typing import Any

from traitlets.config import Config
from traitlets.config.loader import LazyConfigValue

from fractional_gpu.client.discovery import SYSTEM_SOCKET
from fractional_gpu.config import ConfigError
from fractional_gpu_hub.seats import expect_service

READ_SCOPE = "custom:fractional-gpu:read"
ADMIN_SCOPE = "custom:fractional-gpu:admin"
_KEPT = {
    "slurm": ("SLURM_CONF",),
    "kubernetes": ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"),
}
CLUSTERS = tuple(_KEPT)
NAMESPACE_VARIABLE = "JUPYTER_GPU_PAGE_NAMESPACE"
NODES_VARIABLE = "JUPYTER_GPU_PAGE_NODES"
COMPONENT_VARIABLE = "JUPYTER_GPU_PAGE_COMPONENT"
# The settings of the Kubernetes spawner that are passed to the service, with their variables.
_SETTINGS = {
    "namespace": NAMESPACE_VARIABLE,
    "gpu_node_selector": NODES_VARIABLE,
    "component_label": COMPONENT_VARIABLE,
}
_WHERE = "jupyterhub_config.py"
_SCOPES = {
    READ_SCOPE: {"description": "See the GPUs and your own kernels on them, and suspend, resume and pin those kernels"},
    ADMIN_SCOPE: {
        "description": "See and control all kernels, the GPUs and their pools",
        "subscopes": [READ_SCOPE],
    },
}


def add_page(
    c: Config,
    *,
    admins: Sequence[str] = (),
    admin_groups: Sequence[str] = (),
    everybody: bool = True,
    socket: str | None = None,
    name: str = "gpu",
    host: str = "127.0.0.1",
    port: int = 10190,
    cluster: str = "",
) -> None:
    """Add the page at `/services/NAME/`. Raises ConfigError.

    The hub users in `admins` and groups in `admin_groups` can control everything. If `everybody` is set, all users can see their own
    kernels. `socket` is the broker's socket, with the same default as in `configure`. The hub's proxy reaches the service at `host` and
    `port`; if the proxy has its own pod, `host` must be the address of the hub's pod. If `cluster` is `slurm` or `kubernetes`, the page
    shows that engine's nodes and servers instead of a single broker's devices. With `kubernetes`, call this function after setting the
    spawner's namespace and labels.
    """
    for key, value in (("admins", admins), ("admin_groups", admin_groups)):
        if isinstance(value, str):
            raise ConfigError(f"{_WHERE}: add_page({key}={value!r}): expected a list of names, such as [{value!r}]")
    if not 1 <= port <= 65535:
        raise ConfigError(f"{_WHERE}: add_page(port={port}): expected 1 to 65535; choose a free one")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"{_WHERE}: add_page(host={host!r}): expected an address of this machine or pod, such as '127.0.0.1'"
        ) from None
    if cluster not in {"", *CLUSTERS}:
        raise ConfigError(f"{_WHERE}: add_page(cluster={cluster!r}): expected {', '.join(CLUSTERS)}, or leave it out")
    access = f"access:services!service={name}"
    url = f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"
    options = ["--cluster", cluster]
    if not cluster:
        chosen = c.FractionalGPUMixin.get("gpu_socket")
        options = ["--socket", socket or (chosen if isinstance(chosen, str) and chosen else SYSTEM_SOCKET)]
    environment = _environment(c, cluster)
    c.JupyterHub.services.append(
        {
            "name": name,
            "url": url,
            "command": [sys.executable, "-P", "-m", "fractional_gpu_hub.service", *options],
            "oauth_client_allowed_scopes": [READ_SCOPE, ADMIN_SCOPE],
            "oauth_no_confirm": True,  # the service is a part of the hub and requests only the user's identity
            "display": True,
            **({"environment": environment} if environment else {}),
        }
    )
    expect_service(name, "add_page(...)")
    c.JupyterHub.custom_scopes.update(_SCOPES)
    roles: list[dict[str, Any]] = [
        {
            "name": f"{name}-admin",
            "description": "Controls the GPUs and all kernels on them",
            "scopes": [ADMIN_SCOPE, access],
            "users": list(admins),
            "groups": list(admin_groups),
        }
    ]
    if everybody:
        roles += _for_everybody(c, access)
    for role in roles:
        c.JupyterHub.load_roles.append(role)


def _for_everybody(c: Config, access: str) -> list[dict[str, Any]]:
    """Give all users the scopes needed to read and use the page. Return the additional roles the hub must define."""
    # Import these here, because the service's process, for which the hub waits, does not need the hub's application.
    from jupyterhub.app import JupyterHub  # noqa: PLC0415
    from jupyterhub.roles import get_default_roles  # noqa: PLC0415

    ours = [READ_SCOPE, access]
    (user,) = [role for role in get_default_roles() if role["name"] == "user"]
    roles = c.JupyterHub.load_roles  # a list, or items to append to the default
    for role in roles.to_dict().get("extend", ()) if isinstance(roles, LazyConfigValue) else roles:
        if role.get("name") == "user":  # all users have this role, and the hub accepts only one definition
            role["scopes"] = [*role.get("scopes", user["scopes"]), *ours]
            return []
    if hasattr(JupyterHub, "extra_user_scopes"):
        c.JupyterHub.extra_user_scopes.update(ours)
        return []
    # In JupyterHub 5, define the role again with its own scopes and ours.
    return [{"name": "user", "scopes": [*user["scopes"], *ours]}]


def _environment(c: Config, cluster: str) -> dict[str, str]:
    """Return the environment variables the service needs to reach the cluster but would not get from the hub. Raises ConfigError."""
    found = {name: os.environ[name] for name in _KEPT.get(cluster, ()) if name in os.environ}
    if cluster != "kubernetes":
        return found
    if _of_spawner(c, "enable_user_namespaces"):
        raise ConfigError(
            f"{_WHERE}: add_page(cluster='kubernetes') reads the pods of one namespace, but KubeSpawner.enable_user_namespaces gives "
            "each user a separate one: use only one of them"
        )
    settings = {variable: _of_spawner(c, name) for name, variable in _SETTINGS.items()}
    return {**found, **{variable: value for variable, value in settings.items() if isinstance(value, str) and value}}


def _of_spawner(c: Config, name: str) -> object:
    return c.FractionalGPUKubeSpawner.get(name) or c.KubeSpawner.get(name)
