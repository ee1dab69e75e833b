"""The last resort: no broker can run any more, and the memory of suspended kernels still comes back."""

import json
import shutil
from typing import Any
from unittest.mock import patch

import pytest

from fractional_gpu.broker.persistence.lease_files import lease_folder
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World

pytestmark = pytest.mark.promise("rescue")

WITHOUT_WAITING = "%%cpu\n" + CHECK


def rescue(world: World, *arguments: str) -> tuple[int, dict[str, Any], str]:
    with patch.dict(world.environment):
        del world.environment["JUPYTER_GPU_SIMULATE"]
        done = world.command("rescue", "--json", *arguments)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def by_pid(result: dict[str, Any], notebook: Notebook) -> dict[str, Any]:
    pid = int(notebook.must("%%cpu\nimport os\nprint(os.getpid())").text)
    kernels: list[dict[str, Any]] = result["kernels"]
    (found,) = [kernel for kernel in kernels if kernel["pid"] == pid]
    return found


def suspended(world: World, server: Server, seed: int, mib: int = 4) -> Notebook:
    (name,) = world.install(750)
    notebook = server.start(name)
    notebook.must(fill(seed, mib))
    with world.client() as client:
        client.suspend(world.lease(notebook.kernel_id).lease_id)
    return notebook


def test_suspended_kernels_are_rescued_where_no_broker_starts_even_without_a_readable_ledger(
    world: World, server: Server
) -> None:
    notebook = suspended(world, server, 1)
    code, _, complaint = rescue(world)
    assert code == 1
    assert "a broker is running" in complaint
    world.kill_broker()
    code, result, _ = rescue(world)
    assert (code, result["problem"]) == (0, "")
    assert by_pid(result, notebook)["outcome"] == "restored"
    assert notebook.must(WITHOUT_WAITING).text == "intact\n"
    code, result, _ = rescue(world)
    assert (code, by_pid(result, notebook)["outcome"]) == (0, "running")
    world.start_broker()  # a broker that can run again finds the kernel on its device
    world.await_state(notebook.kernel_id, "resident")
    assert notebook.must(CHECK).text == "intact\n"
    without_a_readable_ledger_proc_shows_the_kernels(world, notebook, suspended(world, server, 2))


def without_a_readable_ledger_proc_shows_the_kernels(world: World, first: Notebook, second: Notebook) -> None:
    world.await_state(first.kernel_id, "suspended")
    world.kill_broker()
    ledger = world.ledger
    ledger.write_bytes(b"not a ledger" * 1000)
    shutil.rmtree(lease_folder(world.socket, simulated=True))  # nor is there any other record
    code, result, _ = rescue(world)
    assert str(ledger) in result["problem"]
    outcomes = {by_pid(result, notebook)["outcome"] for notebook in (first, second)}
    assert (code, outcomes) == (1, {"restored", "no-room"}), (
        "the second one's size is unknown and the device is not empty"
    )
    back, waits = (first, second) if by_pid(result, first)["outcome"] == "restored" else (second, first)
    assert back.must(WITHOUT_WAITING).text == "intact\n"
    back.shut_down()
    code, result, _ = rescue(world)
    assert (code, by_pid(result, waits)["outcome"]) == (0, "restored")
    assert waits.must(WITHOUT_WAITING).text == "intact\n"
