"""A lost ledger, and with it the broker's other records: living kernels get their memory back with their next cell."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fractional_gpu.broker.persistence.lease_files import lease_folder
from fractional_gpu.protocol.status import LeaseStatus
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World

pytestmark = pytest.mark.promise("lost-ledger")


def ledger_files(world: World) -> list[Path]:
    found = [path for path in world.folder.rglob("ledger-simulated.sqlite*") if path.is_file()]
    assert found
    return found


def suspended(world: World, server: Server, spec: str, seed: int, mib: int = 4) -> Notebook:
    notebook = server.start(spec)
    notebook.must(fill(seed, mib))
    suspend(world, notebook)
    return notebook


def lose_ledger(world: World, *, records: bool) -> None:
    world.kill_broker()
    for path in ledger_files(world):
        path.unlink()
    folder = lease_folder(world.socket, simulated=True)
    assert folder.is_dir()
    if records:
        shutil.rmtree(folder)


def suspend(world: World, notebook: Notebook) -> None:
    """Save its bytes in host memory, if they are not there: with sizes lost, the other kernel may already have caused that."""
    lease = world.lease(notebook.kernel_id)
    if lease.state != "suspended":
        with world.client() as client:
            client.suspend(lease.lease_id)


def lost_and_back(world: World, notebook: Notebook) -> tuple[LeaseStatus, LeaseStatus]:
    """Lose the ledger; the next cell brings the kernel back on its old lease. Returns the lease before and after."""
    before = world.lease(notebook.kernel_id)
    lose_ledger(world, records=False)
    assert notebook.must(CHECK).text == "intact\n"
    after = world.lease(notebook.kernel_id)
    assert (after.lease_id, after.state) == (before.lease_id, "resident")
    return before, after


def lose_everything(world: World) -> None:
    lose_ledger(world, records=True)
    shutil.rmtree(world.state)
    for path in Path(world.socket).parent.glob("broker.*"):
        path.unlink()


def test_lost_kernels_come_back_by_the_backup_records_or_by_a_rescue_that_finds_them_without(
    world: World, server: Server
) -> None:
    (quarter, half) = world.install(250, 500)
    first, second = notebooks = suspended(world, server, quarter, 1), suspended(world, server, half, 2)
    before, after = lost_and_back(world, first)
    assert (after.spec.fraction_milli, after.spec.reserve_mib) == (before.spec.fraction_milli, before.spec.reserve_mib)
    assert second.must(CHECK).text == "intact\n"

    # Both come back at once; without the records' sizes the second one would need an empty device.
    for notebook in notebooks:
        suspend(world, notebook)
    lose_ledger(world, records=False)
    done = world.command("rescue", "--json")
    assert done.returncode == 0, done.stderr
    assert [kernel["outcome"] for kernel in json.loads(done.stdout)["kernels"]] == ["restored", "restored"]
    for notebook in notebooks:
        assert notebook.must(f"%%cpu\n{CHECK}").text == "intact\n"
        assert notebook.must(CHECK).text == "intact\n"
    without_any_record_kernels_are_listed_and_a_rescue_brings_them_back(world, notebooks, server.start(quarter))


def without_any_record_kernels_are_listed_and_a_rescue_brings_them_back(
    world: World, notebooks: tuple[Notebook, ...], bare: Notebook
) -> None:
    """Nothing is guessed: the cell and status name the command that writes the records again, for each sort of kernel."""
    bare.must("%%cpu\nkept = 42")
    for notebook in notebooks:
        suspend(world, notebook)
    lose_everything(world)
    found = json.loads(world.command("status", "--json").stdout)
    assert found["leases"] == []
    assert "the broker lost its records of 3 living kernels" in found["trouble"]
    error = notebooks[0].run(CHECK).error
    assert "restart the kernel" not in error
    command = ["bash", "-c", error.split("`")[1]]  # as the user who reads it
    done = subprocess.run(command, env=world.environment, check=True, capture_output=True, text=True)
    assert done.stdout.count("\n") >= len([*notebooks, bare])
    for notebook in notebooks:
        assert notebook.must(CHECK).text == "intact\n"
    assert bare.must("print(kept)").text == "42\n"
    assert world.lease(bare.kernel_id).state == "resident"
    assert {world.lease(notebook.kernel_id).spec.pool for notebook in notebooks} == {"default"}
    assert world.status().trouble == ""


def test_a_damaged_ledger_is_set_aside_by_the_command_that_the_cell_is_told(world: World, server: Server) -> None:
    """A kernel whose token was removed is served too, and can be restarted."""
    (spec,) = world.install(250)
    notebook = suspended(world, server, spec, 1)
    world.kill_broker()
    for path in ledger_files(world):
        path.write_bytes(b"damaged" * 1000)
    error = notebook.run(CHECK).error
    assert "restart the kernel" not in error
    subprocess.run(error.split("`")[1], shell=True, check=True)  # noqa: S602 - as the person who reads it
    assert notebook.must(CHECK).text == "intact\n"

    suspend(world, notebook)
    for path in world.folder.rglob("*.token"):
        path.unlink()
    world.kill_broker()
    assert notebook.must(CHECK).text == "intact\n"
    notebook.restart()
    notebook.must(fill(2))
    assert notebook.must(CHECK).text == "intact\n"

    suspend(world, notebook)
    a_broker_that_another_environment_starts_finds_the_ledger(world)
    assert notebook.must(CHECK).text == "intact\n"


def a_broker_that_another_environment_starts_finds_the_ledger(world: World) -> None:
    """It starts with the state folder of the last broker."""
    ledger = world.ledger
    world.kill_broker()
    elsewhere = {**world.environment, "XDG_STATE_HOME": str(world.folder / "elsewhere")}
    code = "from fractional_gpu.client.discovery import ensure_broker; ensure_broker().close()"
    subprocess.run([sys.executable, "-c", code], env=elsewhere, check=True)
    with world.client() as client:
        assert [lease.state for lease in client.status().leases] == ["suspended"]
    assert not list(world.folder.glob("elsewhere/**/*.sqlite"))
    assert ledger.exists()
