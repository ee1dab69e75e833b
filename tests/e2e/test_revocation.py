"""A device that goes away, with real kernels on a simulated device of known bandwidth: what is saved in time, and what users see."""

import json
import time
from statistics import median
from typing import Any

import pytest

from fractional_gpu.gpu.simulated.store import Store
from tests.e2e.test_policies import CHECK, FILL, begin_work
from tests.support.faults import configure
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("revocation")

MIB_S = 64


@pytest.fixture
def slow(world: World) -> World:
    """A world with one device that saves so slowly that it matters."""
    world.start_broker("1x1GiB")
    store = Store(world.simulated_folder)
    configure(store, checkpoint_mib_s=MIB_S)
    store.close()
    return world


def _filled(world: World, server: Server, name: str, seed: int) -> tuple[Notebook, str]:
    notebook = server.start(name)
    notebook.must(FILL.format(seed=seed, mib=64))
    return notebook, world.lease(notebook.kernel_id).lease_id


def _saves_s(world: World, notebook: Notebook, lease_id: str) -> float:
    """Suspend the kernel and bring it back, so that the broker learns the time; return how long the suspend took."""
    until(lambda: not world.lease(notebook.kernel_id).busy, "the kernel idles")
    began_s = time.monotonic()
    assert world.command("suspend", lease_id).returncode == 0
    took_s = time.monotonic() - began_s
    notebook.must(CHECK)
    return took_s


def _told(notebook: Notebook, cell: str) -> str:
    for message in notebook.messages(cell):
        if message["header"]["msg_type"] == "display_data":
            return str(message["content"]["data"]["text/plain"])
    raise AssertionError("the cell ended without a word")


def test_a_deadline_saves_whom_it_can_tells_the_others_and_leaves_running_cells_alone_once_it_is_withdrawn(
    slow: World, server: Server
) -> None:
    (name,) = slow.install(250)
    worked, worked_id = _filled(slow, server, name, 1)
    fresh, fresh_id = _filled(slow, server, name, 2)
    saves_s = [_saves_s(slow, *one) for one in ((worked, worked_id), (fresh, fresh_id)) for _ in range(2)]
    end = slow.folder / "worked"
    cell = begin_work(slow, worked, end)
    enough_s = time.monotonic() + 4
    until(lambda: time.monotonic() > enough_s, "it has worked for longer than the other")
    end.touch()
    assert worked.wait(cell).status == "ok"
    until(lambda: not slow.lease(worked.kernel_id).busy, "the kernel idles")
    end = slow.folder / "fresh"
    cell = begin_work(slow, fresh, end)

    deadline_ms = round(500 + 1800 * median(saves_s))  # a delay of the machine must not make it long enough for both
    drained = slow.command("drain", "--all", "--deadline", f"{deadline_ms}ms")
    began_s = time.monotonic()
    assert drained.returncode == 0, drained.stderr
    assert "goes away in" in drained.stdout
    assert "Save what you need to disk now" in _told(fresh, cell)
    left = slow.lease(fresh.kernel_id)
    assert 0 < (left.goes_away_in_ms or 0) <= deadline_ms
    assert "is expected to take" in left.lease.lost_because
    assert "and it cannot be saved before" in slow.command("status").stdout
    slow.await_state(worked.kernel_id, "suspended")
    assert (time.monotonic() - began_s) * 1000 <= deadline_ms
    assert slow.lease(fresh.kernel_id).state == "resident", "left to its user, who may save to a disk"
    assert "revocation.lost" in slow.command("explain", fresh_id).stdout

    assert slow.command("undrain", "--all").returncode == 0
    end.touch()
    assert fresh.wait(cell).status == "ok"
    for notebook in (worked, fresh):
        notebook.must(CHECK)
    assert "suspend.drain" in slow.command("explain", worked_id).stdout
    a_notice_that_is_withdrawn_leaves_a_running_cell_alone_and_all_is_as_before(slow, fresh, fresh_id, worked)


def a_notice_that_is_withdrawn_leaves_a_running_cell_alone_and_all_is_as_before(
    slow: World, notebook: Notebook, lease_id: str, idle: Notebook
) -> None:
    until(lambda: not slow.lease(idle.kernel_id).busy, "the kernel idles")
    before = slow.lease(notebook.kernel_id)
    end = slow.folder / "end"
    cell = begin_work(slow, notebook, end)
    assert slow.command("drain", "0", "--deadline", "10m").returncode == 0
    assert "it will be paused" in _told(notebook, cell)
    slow.await_state(idle.kernel_id, "suspended")
    during = slow.lease(notebook.kernel_id)
    assert (during.goes_away_in_ms is None, during.lease.lost_because) == (False, "")
    (device,) = slow.status().devices
    assert (device.leases_saved, device.leases_lost) == (1, 0)
    assert slow.command("undrain", "0").returncode == 0
    assert "the notice was withdrawn" in _told(notebook, cell)
    end.touch()
    assert notebook.wait(cell).status == "ok"
    after = slow.lease(notebook.kernel_id)
    assert (after.suspends, after.goes_away_in_ms) == (before.suspends, None)
    (device,) = slow.status().devices
    assert (device.draining, device.goes_away_in_ms, device.leases_saved) == (False, None, 0)
    assert "revocation.withdrawn" in slow.command("explain", lease_id).stdout
    idle.must(CHECK)
    assert slow.lease(idle.kernel_id).state == "resident", "it came back with its next cell"
    assert "goes away" not in slow.command("status").stdout


def _next_with(notebook: Notebook, text: str) -> dict[str, Any]:
    while text not in (message := str(notebook.socket.recv())):
        pass
    found: dict[str, Any] = json.loads(message)
    return found


def test_a_hosts_notice_is_told_beneath_the_last_cell_and_taken_back_there(world: World, server: Server) -> None:
    path = world.folder / "revoked"
    world.configure(f"c.GPUBroker.revocation_notice = {str(path)!r}")
    world.start_broker("1x1GiB")
    (name,) = world.install(250)
    notebook, lease_id = _filled(world, server, name, 1)
    notebook.must(CHECK)
    until(lambda: not world.lease(notebook.kernel_id).busy, "the kernel idles")
    path.write_text("TRUE")
    shown = _next_with(notebook, "goes away in")
    assert "Save your results, models and tables now, to a disk that outlives the host" in str(shown["content"])
    assert world.status().goes_away_in_ms is not None
    assert world.command("status").stdout.count("This machine is revoked") == 1
    path.unlink()
    taken_back = _next_with(notebook, "will not go away after all")
    assert (shown["msg_type"], taken_back["msg_type"]) == ("display_data", "update_display_data")
    assert shown["content"]["transient"] == taken_back["content"]["transient"], "instead of the warning"
    assert world.status().goes_away_in_ms is None
    path.write_text("TRUE")
    _next_with(notebook, "goes away in")
    assert "its host goes away in" in str(notebook.must("%gpu").data)
    path.unlink()
    until(lambda: world.status().goes_away_in_ms is None, "the notice is withdrawn")
    assert "goes away" not in str(notebook.must("%gpu").data)
    assert (world.lease(notebook.kernel_id).suspends, world.lease(notebook.kernel_id).state) == (0, "resident")
    story = world.command("explain", lease_id).stdout
    assert "revocation.host" in story
    assert "revocation.host-stays" in story


def test_a_notice_in_a_file_drains_the_devices_and_gives_them_back_and_a_restarted_broker_keeps_a_deadline(
    world: World,
) -> None:
    path = world.folder / "revoked"
    world.configure(f"c.GPUBroker.revocation_notice = {str(path)!r}\nc.GPUBroker.revocation_drains = True")
    world.start_broker("2x1GiB")
    path.touch()
    until(lambda: all(one.goes_away_in_ms is not None for one in world.status().devices), "both go away")
    path.unlink()
    until(lambda: not any(one.draining for one in world.status().devices), "both are given back")

    assert world.command("drain", "0", "--deadline", "10m").returncode == 0
    (before,) = [one.goes_away_in_ms for one in world.status().devices if one.draining]
    world.kill_broker()
    world.start_broker()
    (after,) = [one.goes_away_in_ms for one in world.status().devices if one.draining]
    assert before is not None
    assert after is not None
    assert 0 < after <= before
    assert "it goes away in" in world.command("status").stdout
