"""Kernels take turns without any Jupyter server: under nbclient, which runs whole notebooks, and under plain jupyter_client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.managed import entered, own_event_loop
from tests.support.stories import CHECK, fill
from tests.support.world import World, new_world

TURNS = 2
MIB = 8


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One broker for all tests of this file."""
    with new_world() as made:
        yield made


@pytest.fixture
def name(world: World) -> Iterator[str]:
    (installed,) = world.install(750)
    with entered(world):
        yield installed


def notebook_of(*codes: str) -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    notebook.cells = [nbformat.v4.new_code_cell(code) for code in codes]  # type: ignore[no-untyped-call]
    return notebook


def assert_turns_were_taken(world: World) -> None:
    leases = world.status().leases
    assert len(leases) == 2
    for lease in leases:
        assert lease.suspends >= TURNS // 2
        assert lease.resumes >= TURNS // 2


async def test_turns_of_two_notebooks_under_nbclient(world: World, name: str) -> None:
    notebooks = [notebook_of(fill(seed, MIB), *[CHECK] * TURNS) for seed in (1, 2)]
    first, second = (NotebookClient(notebook, kernel_name=name) for notebook in notebooks)
    async with first.async_setup_kernel(), second.async_setup_kernel():
        for turn in range(TURNS + 1):
            for client in (first, second):
                await client.async_execute_cell(client.nb.cells[turn], turn)
        assert_turns_were_taken(world)
    assert world.status().leases == []
    for notebook in notebooks:
        for cell in notebook.cells[1:]:
            assert [output.get("text") for output in cell.outputs] == [
                "intact\n"
            ]  # and no output about waiting is left


def test_whole_notebooks_that_run_at_the_same_time_end_well(world: World, name: str) -> None:
    def run(seed: int) -> list[str]:
        notebook = notebook_of(fill(seed, MIB), *[CHECK] * 3)
        with own_event_loop():
            NotebookClient(notebook, kernel_name=name).execute()
        return ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, (1, 2))) == [["", *["intact\n"] * 3]] * 2
    assert world.status().leases == []
