"""A suspended kernel comes back before its next cell asks, because of its user's actions in the notebook; never at a neighbour's cost."""

import pytest

from fractional_gpu.protocol.messages import ExpectRequest
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World

pytestmark = pytest.mark.promise("early-resume")


def reasons(world: World, notebook: Notebook) -> list[str]:
    with world.client() as client:
        return [line.reason for line in client.story(world.lease(notebook.kernel_id).lease_id).lines]


def waited(world: World, notebook: Notebook) -> bool:
    before = len(reasons(world, notebook))
    assert notebook.must(CHECK).text == "intact\n"
    return any(one.startswith(("wait.", "resume.room")) for one in reasons(world, notebook)[before:])


def test_a_sign_of_a_cell_brings_a_kernel_back_before_it_and_never_at_a_neighbours_cost(
    world: World, server: Server
) -> None:
    world.complete_without_jedi()
    (name,) = world.install(750)
    notebook = server.start(name)
    notebook.must(fill(1))
    world.suspend_for_others(notebook.kernel_id)
    another_program_can_tell_a_sign_and_one_that_is_wrong_costs_one_move_at_most(world, notebook)
    world.suspend_for_others(notebook.kernel_id)
    a_completion_brings_a_kernel_back_before_its_cell(world, notebook)
    a_kernel_that_its_user_suspended_stays_suspended_until_a_cell_runs(world, notebook)
    world.suspend_for_others(notebook.kernel_id)
    assert world.command("pool", "default", "min_residency=1h").returncode == 0
    a_kernel_that_came_early_leaves_at_once_for_one_that_runs_a_cell(world, notebook, server.start(name))


def another_program_can_tell_a_sign_and_one_that_is_wrong_costs_one_move_at_most(
    world: World, notebook: Notebook
) -> None:
    assert world.command("pool", "default", "foresight_vain=1MiB").returncode == 0
    with world.client() as client:
        client.expect(world.lease(notebook.kernel_id).lease_id, ExpectRequest(sign="typing", within_ms=60_000))
    assert world.lease(notebook.kernel_id).lease.expected_by == "typing"
    assert world.lease(notebook.kernel_id).state == "suspended", "to move it would take more than the bound"
    assert waited(world, notebook)
    assert world.command("pool", "default", "foresight_vain=256GiB").returncode == 0


def a_completion_brings_a_kernel_back_before_its_cell(world: World, notebook: Notebook) -> None:
    notebook.ask("complete_request", {"code": "buff", "cursor_pos": 4})
    early = world.await_state(notebook.kernel_id, "resident")
    assert "resume.expected" in reasons(world, notebook)
    assert early.lease.came_early
    told = world.command("explain", early.lease_id)
    assert "a cell is expected (a completion was requested)" in told.stdout, told
    assert not waited(world, notebook)
    assert not world.lease(notebook.kernel_id).lease.came_early


def a_kernel_that_its_user_suspended_stays_suspended_until_a_cell_runs(world: World, notebook: Notebook) -> None:
    notebook.must("%gpu release")
    world.await_state(notebook.kernel_id, "suspended")
    before = len(reasons(world, notebook))
    notebook.ask("complete_request", {"code": "buff", "cursor_pos": 4})
    with world.client() as client:
        client.expect(world.lease(notebook.kernel_id).lease_id, ExpectRequest(sign="typing", within_ms=60_000))
    notebook.must("# only a comment")
    lease = world.lease(notebook.kernel_id)
    assert (lease.state, lease.lease.expected_by) == ("suspended", "")
    assert "resume.expected" not in reasons(world, notebook)[before:]
    assert notebook.must(CHECK).text == "intact\n"


def a_kernel_that_came_early_leaves_at_once_for_one_that_runs_a_cell(
    world: World, notebook: Notebook, other: Notebook
) -> None:
    with world.client() as client:
        client.expect(world.lease(notebook.kernel_id).lease_id, ExpectRequest(sign="hover"))
    world.await_state(notebook.kernel_id, "resident")
    other.must(fill(2))
    assert world.lease(notebook.kernel_id).state == "suspended"
    world.suspend_for_others(other.kernel_id)
    assert notebook.must(CHECK).text == "intact\n"
