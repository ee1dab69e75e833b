"""The pods of the node, by the real client against a strict stand-in. There was no cluster: validated, never seen running."""

from collections.abc import Callable
from typing import Any

from fractional_gpu.engines import kubernetes
from fractional_gpu.engines.engine import NodeWrite
from fractional_gpu.engines.kubernetes import KubernetesEngine
from fractional_gpu.engines.pods import SUMMARY, resource_of
from tests.engines.kubernetes.api_server import ApiServer
from tests.engines.kubernetes.conftest import NODE, engine_of, rules_of, settings_for
from tests.engines.kubernetes.pods import pod_of, uid_of

DEFAULT = resource_of("default")


def until(engine: KubernetesEngine, ask: Callable[[], Any], what: str) -> Any:  # noqa: ANN401 - what is asked for
    """Wait for changes of the cluster until there is an answer."""
    for _ in range(600):
        if answer := ask():
            return answer
        engine.changed.wait(0.1)
        engine.changed.clear()
    raise AssertionError(f"not within a minute: {what}; pods: {engine.pods()}")


def uids(engine: KubernetesEngine) -> set[str] | None:
    found = engine.pods()
    return None if found is None else {pod.metadata.uid for pod in found}


def until_pods(engine: KubernetesEngine, *numbers: int) -> None:
    until(engine, lambda: uids(engine) == {uid_of(number) for number in numbers}, f"pods {numbers}")


def test_the_nodes_pods_are_listed_in_pages_and_then_watched(server: ApiServer, said: list[str]) -> None:
    server.page = 2
    for number in range(1, 6):
        server.put(pod_of(number))
    server.put(pod_of(6, node="elsewhere"))
    with engine_of(server, said) as engine:
        until_pods(engine, 1, 2, 3, 4, 5)
        until(engine, lambda: server.watching, "it watches")
        server.put(pod_of(7, node="elsewhere"))
        server.put(pod_of(8))
        server.delete("jhub/jupyter-1")
        until_pods(engine, 2, 3, 4, 5, 8)
        server.put(pod_of(8, phase="Succeeded"))
        until(engine, lambda: [pod for pod in engine.pods() or () if pod.ended], "it has ended")
    assert said == []
    assert sum("watch=" in request for request in server.requests) == 1
    assert sum("continue=" in request for request in server.requests) == 2


def test_a_watch_that_ends_begins_where_it_ended(server: ApiServer, engine: KubernetesEngine) -> None:
    until(engine, lambda: server.watching, "it watches")
    server.put(pod_of(1))
    until_pods(engine, 1)
    version = server.bookmark()
    server.put(pod_of(2))
    until_pods(engine, 1, 2)
    last = server.bookmark()
    server.end_watches()
    server.put(pod_of(3))
    until_pods(engine, 1, 2, 3)
    watches = [request for request in server.requests if "watch=" in request]
    lists = [request for request in server.requests if "/pods?" in request and "watch=" not in request]
    assert len(lists) == 1, "a watch that ended in order needs no new list"
    assert any(f"resourceVersion={seen}" in watches[-1] for seen in (version, int(version) + 1, last))


def test_an_expired_version_starts_again_with_a_list(server: ApiServer, engine: KubernetesEngine) -> None:
    """410, as an answer and as an event: a pod deleted meanwhile is gone, although no event said so."""
    server.put(pod_of(1))
    server.put(pod_of(2))
    until_pods(engine, 1, 2)
    until(engine, lambda: server.watching, "it watches")
    server.failures.append(("watch pods", 410))
    server.end_watches()
    server.pods.pop("jhub/jupyter-1")
    until_pods(engine, 2)
    until(engine, lambda: server.watching, "it watches again")
    server.pods.pop("jhub/jupyter-2")
    server.send_error(410)
    until_pods(engine)


def test_a_server_that_fails_is_asked_again_and_its_pods_stay(
    server: ApiServer, engine: KubernetesEngine, said: list[str]
) -> None:
    server.put(pod_of(1))
    until_pods(engine, 1)
    until(engine, lambda: server.watching, "it watches")
    server.failures += [("watch pods", 503)] * 3 + [("watch pods", 429)]
    server.end_watches()
    until(engine, lambda: server.watching and not server.failures, "it watches again")
    assert uids(engine) == {uid_of(1)}
    server.put(pod_of(2))
    until_pods(engine, 1, 2)
    assert said[0] == "the Kubernetes API cannot watch pods at the moment (503: Failure: busy)"
    assert said[-1] == "the API server is responding again; watching this node's pods"
    assert len(said) == 3, "each trouble is said once"


def test_a_wrong_token_and_a_server_that_is_not_there_are_told_apart(server: ApiServer, said: list[str]) -> None:
    settings = settings_for(server)
    settings.api_key["BearerToken"] = "Bearer another"
    with KubernetesEngine(settings, NODE, ("default",), said.append) as engine:
        until(engine, lambda: said, "it says why")
    assert "(401:" in said[0]
    del said[:]
    settings.host = "http://127.0.0.1:1"
    with KubernetesEngine(settings, NODE, ("default",), said.append) as engine:
        until(engine, lambda: said, "it says why")
    assert said[0].startswith("the Kubernetes API is not responding: ")


# -- the node --------------------------------------------------------------------------------------------------------------


def test_counts_and_summary_are_one_patch_of_the_nodes_status(server: ApiServer, engine: KubernetesEngine) -> None:
    server.put(pod_of(1, "250"))
    server.put(pod_of(2, "1k", phase="Succeeded"))
    until_pods(engine, 1, 2)
    record = engine.read_node()
    assert (record.counts, record.in_use) == (
        {DEFAULT: -1, resource_of("large"): -1},
        {DEFAULT: 250, resource_of("large"): 0},
    )
    engine.write_node(NodeWrite(counts={DEFAULT: 3750, resource_of("large"): 2000}, summary="{}"), record)
    status = server.nodes[NODE]["status"]
    assert status["capacity"] == {
        "cpu": "8",
        "memory": "32Gi",
        "pods": "110",
        DEFAULT: "3750",
        resource_of("large"): "2k",
    }
    assert status["allocatable"] == status["capacity"]
    record = engine.read_node()
    assert (record.counts, record.summary) == ({DEFAULT: 3750, resource_of("large"): 2000}, "{}")
    version = server.nodes[NODE]["metadata"]["resourceVersion"]
    engine.write_node(NodeWrite(counts=record.counts, summary="{}"), record)
    assert server.nodes[NODE]["metadata"]["resourceVersion"] == version, (
        "the same again is no change for watchers of nodes"
    )
    engine.remove()
    assert server.nodes[NODE]["status"]["capacity"] == {"cpu": "8", "memory": "32Gi", "pods": "110"}
    assert SUMMARY not in server.nodes[NODE]["metadata"]["annotations"]


def test_the_roles_give_what_the_client_uses_and_nothing_else(
    base: list[dict[str, Any]], usage: list[dict[str, Any]], said: list[str]
) -> None:
    with ApiServer(rules_of(base, usage)) as server:
        server.add_node(NODE)
        server.put(pod_of(1))
        with engine_of(server, said) as engine:
            until_pods(engine, 1)
            until(engine, lambda: server.watching, "it watches")
            engine.write_node(NodeWrite(counts={DEFAULT: 1}, summary="{}"), engine.read_node())
            (pod,) = engine.pods() or ()
            engine.annotate_pod(pod, {"fractional-gpu.jupyter.org/seat": "granted"})
        granted = {
            (verb, resource) for rule in server.rules for resource in rule["resources"] for verb in rule["verbs"]
        }
        assert server.used == granted == set(kubernetes.RIGHTS)
        assert all(rule["apiGroups"] == [""] for rule in server.rules)
        assert server.defects == []
