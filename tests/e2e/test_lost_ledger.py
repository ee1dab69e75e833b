"""A ledger that is lost, with everything else that a broker keeps: the memory of living kernels comes back with their next cell."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fractional_gpu.broker.persistence.lease_files import lease_folder
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, until


def ledger_files(world: World) -> list[Path]:
    """The ledger with what lies beside it, wherever it is."""
    found = [path for path in world.folder.rglob("ledger-simulated.sqlite*") if path.is_file()]
    assert found
    return found


def suspended(world: World, server: Server, spec: str, seed: int, mib: int = 4) -> Notebook:
    """A kernel whose bytes are in host memory."""
    notebook = server.start(spec)
    notebook.must(fill(seed, mib))
    with world.client() as client:
        client.suspend(world.lease(notebook.kernel_id).lease_id)
    return notebook


def lose_ledger(world: World, *, records: bool) -> None:
    """Kill the broker and remove its ledger, and with `records` the second records, too."""
    world.kill_broker()
    for path in ledger_files(world):
        path.unlink()
    folder = lease_folder(world.socket, simulated=True)
    assert folder.is_dir()
    if records:
        shutil.rmtree(folder)


@pytest.mark.parametrize("records", [False, True], ids=["records-kept", "records-lost"])
def test_suspended_kernels_come_back_with_their_next_cells_after_the_ledger_is_lost(
    world: World, server: Server, records: bool
) -> None:
    (quarter, half) = world.install(250, 500)
    first, second = suspended(world, server, quarter, 1), suspended(world, server, half, 2)
    before = world.lease(first.kernel_id)
    lose_ledger(world, records=records)
    assert first.must(CHECK).text == "intact\n"
    after = world.lease(first.kernel_id)
    assert (after.lease_id, after.state) == (before.lease_id, "resident")
    if not records:
        assert (after.fraction_milli, after.reserve_mib) == (before.fraction_milli, before.reserve_mib)
    assert second.must(CHECK).text == "intact\n"
    if records:  # the smallest fraction that holds what each uses
        until(lambda: world.lease(second.kernel_id).fraction_milli == 125, "the lease gets the size that it uses")


def command(world: World, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `jupyter gpu ARGUMENTS` as a person would."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "fractional_gpu.commands.main", *arguments],
        env=world.environment,
        capture_output=True,
        text=True,
        check=False,
    )


def lose_everything(world: World) -> None:
    """Kill the broker and remove all that it wrote."""
    lose_ledger(world, records=True)
    shutil.rmtree(world.state)
    for path in Path(world.socket).parent.glob("broker.*"):
        path.unlink()


def test_status_and_resume_find_the_kernels_of_a_broker_that_lost_everything(world: World, server: Server) -> None:
    (spec,) = world.install(250)
    notebooks = [suspended(world, server, spec, seed) for seed in (1, 2)]
    lose_everything(world)
    found = json.loads(command(world, "status", "--json").stdout)
    assert {lease["state"] for lease in found["leases"]} == {"suspended"}
    assert len(found["leases"]) == 2
    lose_everything(world)
    assert "take" in command(world, "doctor").stdout
    done = command(world, "resume", "--all")
    assert done.returncode == 0, done.stderr
    for notebook in notebooks:
        assert notebook.must(CHECK).text == "intact\n"


def test_rescue_goes_by_the_second_records(world: World, server: Server) -> None:
    """Both come back at once, where without the records' sizes the second one would need an empty device."""
    (spec,) = world.install(250)
    notebooks = [suspended(world, server, spec, seed) for seed in (1, 2)]
    lose_ledger(world, records=False)
    done = command(world, "rescue", "--json")
    assert done.returncode == 0, done.stderr
    assert [kernel["outcome"] for kernel in json.loads(done.stdout)["kernels"]] == ["restored", "restored"]
    for notebook in notebooks:
        assert notebook.must(f"%%cpu\n{CHECK}").text == "intact\n"
        assert notebook.must(CHECK).text == "intact\n"


def test_a_damaged_ledger_is_set_aside_by_the_command_that_the_cell_is_told(world: World, server: Server) -> None:
    (spec,) = world.install(250)
    notebook = suspended(world, server, spec, 1)
    world.kill_broker()
    for path in ledger_files(world):
        path.write_bytes(b"damaged" * 1000)
    error = notebook.run(CHECK).error
    assert "restart the kernel" not in error
    subprocess.run(error.split("`")[1], shell=True, check=True)  # noqa: S602 - as the person who reads it
    assert notebook.must(CHECK).text == "intact\n"


def test_a_kernel_without_anything_on_a_device_keeps_its_variables(world: World, server: Server) -> None:
    """Its lease was lost with everything: it gets one when it asks."""
    (spec,) = world.install(250)
    notebook = server.start(spec)
    notebook.must("%%cpu\nkept = 42")
    lose_everything(world)
    assert notebook.must("print(kept)").text == "42\n"
    assert world.lease(notebook.kernel_id).state == "resident"
    notebook.must(fill(1))
    assert notebook.must(CHECK).text == "intact\n"


def test_a_kernel_whose_token_was_removed_is_served_and_can_be_restarted(world: World, server: Server) -> None:
    (spec,) = world.install(250)
    notebook = suspended(world, server, spec, 1)
    for path in world.folder.rglob("*.token"):
        path.unlink()
    world.kill_broker()
    assert notebook.must(CHECK).text == "intact\n"
    notebook.restart()
    notebook.must(fill(2))
    assert notebook.must(CHECK).text == "intact\n"
