"""The manifests as kustomize renders them, a stand-in for the API server, and a cluster of one node."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_asyncio import client

from fractional_gpu.engines import kubernetes
from fractional_gpu.engines.kubernetes import KubernetesEngine
from tests.engines.kubernetes.api_server import TOKEN, ApiServer

EXAMPLES = Path(__file__).parents[3] / "examples" / "kubernetes"
NODE = "gpu-1"


def rendered(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a kustomization."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], stdout=subprocess.PIPE, check=True, timeout=60)
    return [found for found in yaml.safe_load_all(done.stdout) if found]


@pytest.fixture(scope="session")
def base() -> list[dict[str, Any]]:
    """Return the objects of the base."""
    return rendered(EXAMPLES)


@pytest.fixture(scope="session")
def usage() -> list[dict[str, Any]]:
    """Return the objects of the optional right."""
    return rendered(EXAMPLES / "usage")


@pytest.fixture(scope="session")
def hub() -> list[dict[str, Any]]:
    """Return the objects of the hub's right."""
    return rendered(EXAMPLES / "hub")


@pytest.fixture(scope="session")
def users() -> list[dict[str, Any]]:
    """Return the policy for users' pods."""
    return rendered(EXAMPLES / "users")


def rules_of(*objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rules of all ClusterRoles."""
    return [rule for some in objects for one in some if one["kind"] == "ClusterRole" for rule in one["rules"]]


@pytest.fixture
def server(base: list[dict[str, Any]]) -> Iterator[ApiServer]:
    """An API server with one node, which gives the agent what the base's role gives. An unknown request fails the test."""
    with ApiServer(rules_of(base)) as server:
        server.add_node(NODE)
        yield server
        assert server.defects == []


def settings_for(server: ApiServer) -> client.Configuration:
    """Return the settings with which the real client reaches the stand-in."""
    settings = client.Configuration(host=server.url)
    settings.api_key["BearerToken"] = f"Bearer {TOKEN}"
    return settings


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def said() -> list[str]:
    """Return what the agent wrote to its log."""
    return []


@pytest.fixture
def engine(server: ApiServer, said: list[str]) -> Iterator[KubernetesEngine]:
    """The real client."""
    with engine_of(server, said) as engine:
        yield engine


def engine_of(server: ApiServer, said: list[str], node: str = NODE) -> KubernetesEngine:
    """Return a node's engine."""
    return KubernetesEngine(settings_for(server), node, ("default", "large"), said.append)
