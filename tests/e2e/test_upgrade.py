"""A broker of this version over what an earlier one left, and back, while suspended kernels live."""

import subprocess
import sys
from pathlib import Path

from fractional_gpu.client.client import BrokerClient
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World


def as_before(world: World) -> Path:
    """Have the next broker keep its state where an earlier version did, and leave nothing behind that names the folder."""
    run = Path(world.socket).parent
    world.configure(f"c.GPUBroker.state_dir = {str(run)!r}\n")
    return run / "ledger-simulated.sqlite"


def end_as_before(world: World) -> None:
    """Kill the broker, and leave what an earlier version leaves."""
    world.kill_broker()
    world.configure("")
    for path in (world.state / "broker.json", Path(world.socket).with_name("broker.json")):
        path.unlink(missing_ok=True)


def suspended(world: World, server: Server, seed: int) -> Notebook:
    (name,) = world.install(750)
    notebook = server.start(name)
    notebook.must(fill(seed))
    with world.client() as client:
        client.suspend(world.lease(notebook.kernel_id).lease_id)
    return notebook


def test_an_earlier_versions_ledger_is_taken_along_with_its_suspended_kernels(world: World, server: Server) -> None:
    old = as_before(world)
    first, second = suspended(world, server, 1), suspended(world, server, 2)
    end_as_before(world)
    assert old.with_name(f"{old.name}-wal").exists(), "its last words are in the log only"
    assert not world.ledger.exists()

    assert second.must(CHECK).text == "intact\n", "the cell starts a broker of this version"
    assert world.ledger.exists()
    assert not old.exists()
    assert not old.with_name(f"{old.name}-wal").exists()
    assert world.lease(first.kernel_id).state == "suspended"
    assert first.must(CHECK).text == "intact\n"


def test_a_broker_of_this_version_is_started_by_the_command_that_an_earlier_version_left_and_from_another_environment(
    world: World, server: Server
) -> None:
    notebook = suspended(world, server, 1)
    world.kill_broker()
    for path in (world.state / "broker.json", Path(world.socket).with_name("broker.json")):
        command = path.read_text()
        assert '"fractional_gpu.broker"' in command
        path.write_text(command.replace('"fractional_gpu.broker"', '"provisioner.broker"'))
    assert notebook.must(CHECK).text == "intact\n"
    assert world.lease(notebook.kernel_id).state == "resident"

    # Another interpreter's environment leads to the same ledger: the broker is started with the folder that it had.
    with world.client() as client:
        client.suspend(world.lease(notebook.kernel_id).lease_id)
    ledger = world.ledger
    world.kill_broker()
    elsewhere = {**world.environment, "XDG_STATE_HOME": str(world.folder / "elsewhere")}
    code = "from fractional_gpu.client.discovery import ensure_broker; ensure_broker().close()"
    subprocess.run([sys.executable, "-c", code], env=elsewhere, check=True)
    with BrokerClient(world.socket) as client:
        assert [lease.state for lease in client.status().leases] == ["suspended"]
    assert not (world.folder / "elsewhere").exists() or not list((world.folder / "elsewhere").rglob("*.sqlite"))
    assert ledger.exists()
    assert notebook.must(CHECK).text == "intact\n"


def test_a_rescue_finds_an_earlier_versions_ledger(world: World, server: Server) -> None:
    old = as_before(world)
    notebook = suspended(world, server, 1)
    end_as_before(world)
    done = world.command("rescue", "--simulate", world.simulate)
    assert done.returncode == 0, done.stderr
    assert ": restored: " in done.stdout
    assert old.exists()
    assert notebook.must("%%cpu\n" + CHECK).text == "intact\n"
