"""Two real kernels on one device: the ledger has their cells, their waits and what they used, and the simulator runs them again."""

import json
import sqlite3
from contextlib import closing

from tests.support.world import Server, new_world

WORK = """
import time
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(64 << 20)
buffer.fill(b"held")
time.sleep(2.5)  # longer than it takes until the broker has sampled it
"""


def test_cells_of_real_kernels_are_recorded_and_simulated_again() -> None:
    with new_world() as world, Server(world) as server:
        (name,) = world.install(750)
        first, second = server.start(name), server.start(name)
        first.must(WORK)
        second.must(WORK)  # both do not fit: the first one leaves
        world.await_state(first.kernel_id, "suspended")
        first.must("assert bytes(buffer.read(4)) == b'held'")
        ids = [world.lease(one.kernel_id).lease_id for one in (first, second)]
        first.shut_down()
        second.shut_down()
        world.end_broker()  # it writes what it has
        ledger = world.ledger
        with closing(sqlite3.connect(f"{ledger.as_uri()}?mode=ro", uri=True)) as reader:
            turns = reader.execute(
                "SELECT lease_id, asked_ms, begun_ms, ended_ms FROM turns ORDER BY asked_ms"
            ).fetchall()
            days = [json.loads(document) for (document,) in reader.execute("SELECT document FROM share_days")]
        done = world.command("simulate", "--from-ledger", str(ledger), "--devices", "1x1GiB", "--json")
        own = world.command("simulate", "--from-ledger", "--devices", "1x1GiB", "--json")
    assert [one[0] for one in turns].count(ids[0]) >= 1
    assert [one[0] for one in turns].count(ids[1]) >= 1
    assert all(asked <= begun <= ended for _, asked, begun, ended in turns)
    assert max(ended - begun for _, _, begun, ended in turns) >= 2000
    assert any(
        one["peak_mib"] >= 64 and one["held_ms"] >= one["busy_ms"] > 0 and one["share"][0] == 750 for one in days
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(own.stdout)["recorded"] == json.loads(done.stdout)["recorded"], "it finds its own ledger"
    figures = json.loads(done.stdout)
    assert figures["sessions"] == 2
    assert figures["gpu_cells"] == figures["cells"] == len(turns)
    assert "mean_error_s" in figures["recorded"]
