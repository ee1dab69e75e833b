"""How the spawn page presents the nodes' summaries, and the engines' spawner base over a bare spawner."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyterhub.spawner import Spawner
from tornado import web

from fractional_gpu.engines.engine import EngineUnavailableError
from fractional_gpu_hub.engines import EngineGPUMixin, NodePool
from fractional_gpu_hub.engines.offers import Terms, host_memory_mib, offers_of
from fractional_gpu_hub.options import gpu_form

NOW_S = 1_000_000.0
TERMS = Terms(now_s=NOW_S, stale_after_s=100)


def node(where: str = "n1", **more: Any) -> NodePool:  # noqa: ANN401 - fields
    given = {
        "name": "default", "devices": 2, "device_mib": 1000, "total_milli": 2000, "held_milli": 500,
        "admissible_milli": 1500, "fractions_milli": [250, 500], "at_s": NOW_S,
    }  # fmt: skip
    return NodePool(node=where, **{**given, **more})


def page(nodes: Sequence[NodePool]) -> str:
    return gpu_form(offers_of(nodes, TERMS), chosen=None, without=False, allow_without=True)


# -- offers ------------------------------------------------------------------------------------------------------------------


def test_the_page_says_what_all_nodes_have_together() -> None:
    text = page([node("n1"), node("n2", admissible_milli=0, held_milli=2000, waiting=3)])
    assert (
        "2 nodes with 4 GPUs; 2.5 of 4 GPUs are held, 1.5 are available now; 3 kernels are waiting for a GPU." in text
    )
    assert "starts at once on 1 of 2 nodes" in text
    assert 'value="default/250" required aria-describedby="gpu-default-250-hint" checked' in text, (
        "the smallest free share"
    )


def test_stale_news_is_shown_with_its_age_and_counts_for_nothing() -> None:
    offers = offers_of([node(at_s=NOW_S - 7200)], TERMS)
    (pool,) = offers.pools
    assert not any(one.free for one in pool.fractions)
    assert pool.fractions[0].sentence == "might not start at once: the nodes' figures are out of date"
    assert "no update from n1 for 2 h" in page([node(at_s=NOW_S - 7200)])


def test_a_pool_whose_nodes_are_all_down_says_why() -> None:
    (pool,) = offers_of([node("n1", why_not="drained"), node("n2", why_not="down")], TERMS).pools
    assert pool.why_not == "no node can start servers right now: n1 is drained, n2 is down"
    assert offers_of([node(why_not="down")], TERMS).default_pool == ""


def test_names_from_nodes_are_escaped() -> None:
    assert "<script>" not in page([node("<script>", why_not="<script>", name="<script>")])


NODES = st.lists(
    st.builds(
        node,
        st.sampled_from(["n1", "n2", "n3"]),
        name=st.sampled_from(["a", "b"]),
        admissible_milli=st.integers(0, 4000),
        fractions_milli=st.lists(st.sampled_from([125, 250, 500, 1000]), unique=True, min_size=1),
        at_s=st.floats(NOW_S - 1000, NOW_S + 1000),
        why_not=st.sampled_from(["", "down"]),
        device_mib=st.integers(1, 100_000),
    )
)


@given(NODES)
def test_a_share_is_free_only_where_a_fresh_node_that_is_up_admits_it(nodes: list[NodePool]) -> None:
    for pool in offers_of(nodes, TERMS).pools:
        for one in pool.fractions:
            admits = [
                there
                for there in nodes
                if there.name == pool.pool
                and one.fraction_milli in there.fractions_milli
                and there.admissible_milli >= one.fraction_milli
                and not there.why_not
                and not TERMS.is_stale(there)
            ]
            assert one.free == bool(admits)


@given(NODES, st.integers(0, 10_000))
def test_the_memory_that_is_asked_for_covers_the_share_on_every_node(nodes: list[NodePool], base_mib: int) -> None:
    for there in nodes:
        for milli in there.fractions_milli:
            asked = host_memory_mib(nodes, there.name, milli, base_mib=base_mib)
            assert asked >= base_mib + there.memory_mib(milli)


# -- the base of the spawners ------------------------------------------------------------------------------------------------


class Engine(Spawner):  # type: ignore[misc] # untyped
    async def start(self) -> tuple[str, int]:
        await self.go.wait()
        return "127.0.0.1", 1

    async def stop(self, now: bool = False) -> None: ...

    async def poll(self) -> int | None:
        return None

    async def progress(self) -> AsyncGenerator[dict[str, Any], None]:
        yield {"progress": 95, "message": "the engine's own"}


class Cluster(EngineGPUMixin, Engine):
    nodes: Sequence[NodePool] = (node(), node("n2", device_mib=4000))
    problem = ""

    async def gpu_nodes(self) -> Sequence[NodePool]:
        if self.problem:
            raise EngineUnavailableError(self.problem)
        return self.nodes

    async def gpu_queue(self) -> AsyncGenerator[str, None]:
        yield "Waiting for resources"
        yield "Expected at 10:00"
        self.go.set()


def message_of(error: Any) -> str:  # noqa: ANN401 - of JupyterHub 5 or 6
    return str(error.jupyterhub_message)


def spawner(options: dict[str, Any], **traits: Any) -> Any:  # noqa: ANN401 - untyped
    made = Cluster(
        user=SimpleNamespace(name="ada", groups=[], id=1, url="/", escaped_name="ada"), hub=SimpleNamespace(), **traits
    )
    made.orm_spawner = SimpleNamespace(state=None, user_options=None, name="", server=None)
    made.user_options, made.go = options, asyncio.Event()
    return made


async def test_a_start_shows_the_queue_and_its_allocation_outlives_the_hub() -> None:
    made = spawner({"name": "default", "fraction": "1/4"}, gpu_base_memory="1GiB")
    assert await made.start() == ("127.0.0.1", 1)
    allocation = made.gpu_allocation
    assert (allocation.memory_mib, allocation.host_memory_mib) == (250, 1024 + 1000), (
        "the smallest cap, the largest need"
    )
    async with aclosing(made.progress()) as events:
        messages = [event["message"] async for event in events]
    assert messages == [
        "Asking the cluster for 1/4 GPU of pool default", "Starting the server", "Waiting for resources", "Expected at 10:00",
        "The cluster has started your server, with 1/4 GPU of pool default", "the engine's own",
    ]  # fmt: skip
    later = spawner({})
    later.load_state(made.get_state())
    assert later.gpu_allocation == allocation
    made.clear_state()
    assert made.gpu_allocation is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pool": "x"}, "no such pool: 'x'; available: default"),
        ({"fraction": "1/8"}, "1/8 GPU is not available in pool default; available: 250m (250 MiB), 500m (500 MiB)"),
        ({"memory": "1GiB"}, "memory 1 GiB was chosen, but in this cluster"),
        ({"pool": "$(id)"}, "pool"),
    ],
)
async def test_what_no_node_offers_is_refused_before_anything_is_asked_for(
    options: dict[str, Any], sentence: str
) -> None:
    made = spawner(options)
    with pytest.raises(web.HTTPError) as refusal:
        await made.start()
    assert sentence.lower() in message_of(refusal.value).lower()
    assert made.gpu_allocation is None


async def test_an_engine_that_does_not_answer_stops_the_start_and_the_page_says_so() -> None:
    made = spawner({}, gpu_allow_without=True)
    made.problem = "the Slurm controller does not answer"
    with pytest.raises(web.HTTPError) as refusal:
        await made.start()
    assert refusal.value.status_code == 503
    assert "You cannot choose a GPU right now: the cluster is not reporting its GPUs." in await made.get_options_form()


def test_a_base_memory_that_is_none_is_refused() -> None:
    with pytest.raises(Exception, match="gpu_base_memory"):
        spawner({}, gpu_base_memory="much")
