"""A ledger that is lost, with everything else that a broker keeps: the memory of living kernels comes back with their next cell."""

import shutil
from pathlib import Path

import pytest

from provisioner.broker.lease_files import lease_folder
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, until


def ledger_files(world: World) -> list[Path]:
    """The ledger with what lies beside it, wherever it is."""
    found = [path for path in world.folder.rglob("ledger-simulated.sqlite*") if path.is_file()]
    assert found
    return found


def suspended(world: World, server: Server, spec: str, seed: int, mib: int = 16) -> Notebook:
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
