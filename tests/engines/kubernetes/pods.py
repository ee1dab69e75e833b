"""Pods for tests, as the API server has them."""

from typing import Any
from uuid import UUID

from msgspec import convert

from fractional_gpu.engines.pods import Pod
from tests.engines.kubernetes.conftest import NODE


def uid_of(number: int) -> str:
    """Return a UID in the API server's format."""
    return str(UUID(int=number))


def read_of(found: dict[str, Any]) -> Pod:
    """Return a pod as read from the API server's answer."""
    return convert(found, Pod)


def pod_of(
    number: int,
    milli: str | None = "250",
    *,
    pool: str = "default",
    node: str = NODE,
    namespace: str = "jhub",
    annotations: dict[str, str] | None = None,
    phase: str = "Running",
) -> dict[str, Any]:
    """Return a pod that asks for a share of a pool."""
    amounts = {} if milli is None else {f"fractional-gpu.jupyter.org/{pool}": milli}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"jupyter-{number}",
            "namespace": namespace,
            "uid": uid_of(number),
            "annotations": annotations or {},
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "notebook", "image": "i", "resources": {"limits": amounts, "requests": amounts}}],
        },
        "status": {"phase": phase},
    }
