"""The files that lead to a running broker are deleted, one at a time and all at once: it puts them back, and no byte is lost."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fractional_gpu.client.http import claim_holder
from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.messages import LeaseRequest
from tests.support.faults import configure
from tests.support.paths import ROOT
from tests.support.stopping import stop
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("restored-files")


def suspended(world: World, server: Server, seed: int) -> Notebook:
    (name,) = world.install(750)
    notebook = server.start(name)
    notebook.must(fill(seed))
    suspend(world, notebook)
    return notebook


def suspend(world: World, notebook: Notebook) -> None:
    """Suspend it. Repeat a request that was cut off because the broker re-executes itself."""

    def ask() -> bool:
        with suppress(BrokerUnavailableError), world.client() as client:
            client.suspend(world.lease(notebook.kernel_id).lease_id)
            return True
        return False

    until(ask, "the kernel is suspended")


def pid_of(world: World) -> int:
    pid = claim_holder(world.socket)
    assert pid is not None
    return pid


def run(world: World) -> Path:
    return Path(world.socket).parent


def remove(path: Path) -> None:
    if path.is_dir():
        gone = path.with_name(f"{path.name}.gone")  # the broker puts things back while a large folder is being emptied
        path.rename(gone)
        shutil.rmtree(gone)
    else:
        path.unlink()


def is_back(world: World, paths: dict[Path, int]) -> bool:
    with suppress(FileNotFoundError, BrokerUnavailableError):
        modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in paths}
        return modes == paths and world.broker_pid() is not None
    return False


# Deleted one after another; `tests/run wiping` removes each file separately. `test_wiping` covers the moments in
# which the broker dies.
DELETED: dict[str, Callable[[World], list[Path]]] = {
    "socket, lock, settings and tokens": lambda world: [
        Path(world.socket),
        Path(f"{world.socket}.lock"),
        run(world) / "broker.json",
        world.state / "broker.json",
        *sorted(world.folder.rglob("*.token")),
    ],
    "the ledger with its log and locks": lambda world: [
        world.ledger,
        *(world.ledger.with_name(f"{world.ledger.name}{suffix}") for suffix in ("-wal", "-shm", ".lock")),
    ],
    "everything": lambda world: [run(world), world.folder / "state"],
}


def test_what_was_deleted_comes_back_and_every_byte_is_there(world: World, server: Server) -> None:
    first, second = suspended(world, server, 1), suspended(world, server, 2)
    for what, paths in DELETED.items():
        delete_and_look(world, what, paths(world), second)
    world.kill_broker()  # the restored files are complete
    assert first.must(CHECK).text == "intact\n"
    states = {lease.kernel_id: lease.state for lease in world.status().leases}
    assert states == {first.kernel_id: "resident", second.kernel_id: "suspended"}


def delete_and_look(world: World, what: str, paths: list[Path], second: Notebook) -> None:
    broker = pid_of(world)
    kept = [
        Path(world.socket),
        Path(f"{world.socket}.lock"),
        run(world) / "broker.json",
        world.state / "broker.json",
        world.ledger,
        *(world.ledger.with_name(f"{world.ledger.name}{suffix}") for suffix in ("-wal", "-shm", ".lock")),
        *sorted(world.folder.rglob("*.token")),
    ]
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in kept}
    tokens = {path: path.read_bytes() for path in kept if path.suffix == ".token"}
    assert (len(tokens), len(paths) > 0) == (2, True)
    for path in paths:
        remove(path)

    assert second.must(CHECK).text == "intact\n", f"{what}: the cell waits for no more than the broker's return"
    assert pid_of(world) == broker, f"{what}: it is the same broker"
    until(lambda: is_back(world, modes) or None, f"{what}: all files are back, as they were")
    assert {path: path.read_bytes() for path in tokens} == tokens
    suspend(world, second)


def test_a_broker_without_leases_ends_with_its_folder_and_one_with_leases_after_them(world: World) -> None:
    world.start_broker()
    remove(run(world))
    until(lambda: claim_holder(world.socket) is None, "the broker without leases has ended")
    assert not run(world).exists()

    world.start_broker()
    broker = pid_of(world)
    with world.client() as client:
        lease_id = client.create_lease(LeaseRequest(fraction_milli=250)).lease_id
    remove(run(world))
    until(lambda: world.broker_pid() == broker or None, "the broker with a lease has put its socket back")
    with world.client() as client:
        client.release(lease_id)
    until(lambda: claim_holder(world.socket) is None, "it has ended after its lease")


def test_the_tools_find_a_broker_whose_files_are_gone_and_one_that_is_to_end_while_it_repairs_ends(
    world: World, server: Server
) -> None:
    notebook = suspended(world, server, 1)
    the_tools_find_a_broker_whose_files_are_gone(world, notebook)
    suspend(world, notebook)
    a_broker_that_is_to_end_while_it_repairs_ends(world, notebook)


def a_broker_that_is_to_end_while_it_repairs_ends(world: World, notebook: Notebook) -> None:
    """It waits for a swap before it re-executes itself; the next broker has everything it wrote meanwhile."""
    broker = pid_of(world)
    store = Store(world.simulated_folder)
    configure(store, restore_mib_s=8)
    resume = threading.Thread(target=resume_quietly, args=(world, notebook))
    resume.start()
    until(lambda: world.lease(notebook.kernel_id).state == "resuming", "a swap begins")
    log = (run(world) / "broker.log").open(encoding="utf-8")
    world.ledger.unlink()
    until(lambda: "restarting the broker to recreate its files" in log.read(), "it repairs itself")
    os.kill(broker, signal.SIGTERM)
    until(lambda: claim_holder(world.socket) is None, "it has ended")
    resume.join(60)
    configure(store, restore_mib_s=0)
    store.close()
    log.close()
    assert notebook.must(CHECK).text == "intact\n"


def test_a_broker_that_executes_itself_again_runs_the_version_that_is_installed_by_then(
    world: World, tmp_path: Path
) -> None:
    """An upgrade with living leases: the process stays."""
    installed = tmp_path / "installed"
    shutil.copytree(ROOT / "provisioner", installed)
    world.environment["PYTHONPATH"] = f"{installed}{os.pathsep}{world.environment['PYTHONPATH']}"
    world.start_broker()
    with world.client() as client:
        client.create_lease(LeaseRequest(fraction_milli=250))
    before = world.status()
    version = installed / "fractional_gpu" / "__init__.py"
    version.write_text(version.read_text().replace(f'"{before.version}"', '"9.9.9"'))
    Path(world.socket).unlink()
    until(lambda: world.broker_pid() and world.status().version == "9.9.9", "the new version serves")
    after = world.status()
    assert (after.pid, len(after.leases)) == (before.pid, 1)


def resume_quietly(world: World, notebook: Notebook) -> None:
    with suppress(FractionalGPUError), world.client() as client:
        client.resume(world.lease(notebook.kernel_id).lease_id)


def test_a_broker_that_is_to_serve_for_ever_puts_its_folder_back(world: World) -> None:
    world.configure("c.GPUBroker.idle_exit = 'never'\n")
    world.start_broker()
    broker = pid_of(world)
    remove(run(world))
    until(lambda: world.broker_pid() == broker or None, "its socket is back")


def test_a_folder_that_another_made_meanwhile_is_not_used_and_a_broker_that_stays_away_is_named(world: World) -> None:
    world.start_broker()
    with world.client() as client:
        client.create_lease(LeaseRequest(fraction_milli=250))  # otherwise it would end with its folder
    for what in ("another's folder", "a folder open to all", "a link"):
        another_makes_the_folder(world, what)
    a_broker_that_stays_away_is_named(world)


def another_makes_the_folder(world: World, what: str) -> None:
    broker = pid_of(world)
    # It checks the folder and then writes: stopped in between, it would write into the next folder.
    until(lambda: list(run(world).glob("*.leases*/*.json")), "the backup record of the lease is there")
    stop(broker)
    place = run(world)
    log = (place / "broker.log").open(encoding="utf-8")  # deleted with the folder, and still written to
    shutil.rmtree(place)
    elsewhere = world.folder / "theirs"
    elsewhere.mkdir(mode=0o777, exist_ok=True)
    os.chown(elsewhere, 65534, 65534)
    if what == "a link":
        place.symlink_to(elsewhere)
    else:
        place.mkdir()
        place.chmod(0o777)
        if what == "another's folder":
            os.chown(place, 65534, 65534)
    os.kill(broker, signal.SIGCONT)
    said = ""

    def refused() -> bool:
        nonlocal said
        said += log.read()
        return "cannot be restored" in said and "backup records are not up to date" in said

    until(refused, "the broker refuses the folder, for its own files and for the records of leases")
    assert list(place.iterdir()) == []
    assert list(elsewhere.iterdir()) == []
    assert pid_of(world) == broker
    remove_place(place)
    until(world.broker_pid, "the broker is back in a new folder")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    log.close()


def remove_place(place: Path) -> None:
    if place.is_symlink():
        place.unlink()
    else:
        place.rmdir()


def the_tools_find_a_broker_whose_files_are_gone(world: World, notebook: Notebook) -> None:
    """While stopped it cannot put them back: its callers learn its process and what to do."""
    broker = pid_of(world)
    stop(broker)
    try:
        remove(run(world))  # meanwhile its kernel may put its token back
        done = world.command("rescue")
        assert done.returncode == 1
        assert f"a broker is running on {world.socket} (process {broker})" in done.stderr
        assert "jupyter gpu broker --stop" in done.stderr
        assert "Errno" not in done.stderr
    finally:
        os.kill(broker, signal.SIGCONT)
    done = world.command("status", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pid"] == broker, "it waited for the socket's return"
    assert notebook.must(CHECK).text == "intact\n"


def a_broker_that_stays_away_is_named(world: World) -> None:
    broker = pid_of(world)
    stop(broker)
    try:
        Path(world.socket).unlink()
        code = (
            "from fractional_gpu.client.discovery import ensure_broker\n"
            "from fractional_gpu.protocol.errors import BrokerUnavailableError\n"
            "try:\n    ensure_broker(timeout_s=0.5)\nexcept BrokerUnavailableError as error:\n    print(error)\n"
        )
        said = subprocess.run(
            [sys.executable, "-c", code], env=world.environment, capture_output=True, text=True, check=True
        )
        assert f"(process {broker})" in said.stdout
        assert "jupyter gpu broker --restart" in said.stdout
    finally:
        os.kill(broker, signal.SIGCONT)
    until(world.broker_pid, "the socket is back")
