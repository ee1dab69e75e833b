"""Two real kernels on one device, one suspended for the other: each form of the report shows the same use."""

import csv
import getpass
import io
import json
import re
import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import pytest

from tests.support.world import Server, World, new_world

pytestmark = pytest.mark.promise("reports-add-up")

PRICED = """
c.GPUBroker.pools = {"default": {"price": "360000 EUR"}}
"""
WORK = """
import time
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(64 << 20)
buffer.fill(b"held")
time.sleep(2.5)  # longer than it takes until the broker has sampled it
"""


def test_use_by_user_and_notebook_agrees_in_each_form_and_the_recorded_cells_are_simulated_again(
    tmp_path: Path,
) -> None:
    with new_world() as world, Server(world) as server:
        world.configure(PRICED)
        (name,) = world.install(750)
        first, second = server.start(name), server.start(name)
        first.must(WORK)
        second.must(WORK)  # both do not fit: the first one leaves
        ids = [world.lease(one.kernel_id).lease_id for one in (first, second)]
        assert world.await_state(first.kernel_id, "suspended").lease.saved_mib >= 64
        first.must("assert bytes(buffer.read(4)) == b'held'")
        first.shut_down()
        second.shut_down()
        assert world.status().leases == []
        the_report_agrees_as_text_csv_json_and_html(world, tmp_path, *ids)
        world.end_broker()  # it writes what it has
        the_cells_were_recorded_and_are_simulated_again(world, ids)


def the_report_agrees_as_text_csv_json_and_html(world: World, tmp_path: Path, first_id: str, second_id: str) -> None:
    def report(*words: str) -> str:
        done = world.command("report", *words, "--by", "user,notebook,lease")
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    found = json.loads(report("--json"))
    rows = list(csv.DictReader(io.StringIO(report("--csv"))))
    page = tmp_path / "use.html"
    assert report("--html", "--output", str(page)) == ""
    text = report()

    by_lease = {one["of"]["lease"]: one for one in found["entries"]}
    assert set(by_lease) == {first_id, second_id}
    assert {one["of"]["user"] for one in found["entries"]} == {getpass.getuser()}
    assert found["simulated"] is True
    moved = by_lease[first_id]
    assert moved["suspended_ms"] > 0
    assert moved["moved_mib"] >= 2 * 64
    assert moved["resident_milli"] > moved["charge_milli"] > 0
    assert moved["whole_milli"] > by_lease[second_id]["charge_milli"] > 0

    (total,) = found["totals"]
    charged = Decimal(total["charge_milli"]) / 1000
    assert sum(Decimal(one["charge_milli"]) for one in found["entries"]) / 1000 == charged
    assert sum(Decimal(row["BilledCost"]) for row in rows) == charged
    assert {row["BillingCurrency"] for row in rows} == {"EUR"}
    assert {row["ResourceId"] for row in rows if row["SubAccountId"]} == {f"lease/{one}" for one in by_lease}
    shown = [f"{charged:,.3f} EUR", *(f"{Decimal(one['charge_milli']) / 1000:,.3f} EUR" for one in found["entries"])]
    assert all(one in page.read_text() and one in text for one in shown)
    (total_line,) = [line for line in text.splitlines() if re.match(r" +total ", line)]
    assert shown[0] in total_line
    assert "simulated: no real GPU was used" in text


def the_cells_were_recorded_and_are_simulated_again(world: World, ids: list[str]) -> None:
    ledger = world.ledger
    with closing(sqlite3.connect(f"{ledger.as_uri()}?mode=ro", uri=True)) as reader:
        turns = reader.execute("SELECT lease_id, asked_ms, begun_ms, ended_ms FROM turns ORDER BY asked_ms").fetchall()
        days = [json.loads(document) for (document,) in reader.execute("SELECT document FROM share_days")]
    assert {one[0] for one in turns} == set(ids)
    assert all(asked <= begun <= ended for _, asked, begun, ended in turns)
    assert max(ended - begun for _, _, begun, ended in turns) >= 2000
    assert any(
        one["peak_mib"] >= 64 and one["held_ms"] >= one["busy_ms"] > 0 and one["share"][0] == 750 for one in days
    )
    done = world.command("simulate", "--from-ledger", str(ledger), "--devices", "1x1GiB", "--json")
    assert done.returncode == 0, done.stderr
    own = world.command("simulate", "--from-ledger", "--devices", "1x1GiB", "--json")
    assert json.loads(own.stdout)["recorded"] == json.loads(done.stdout)["recorded"], "it finds its own ledger"
    figures = json.loads(done.stdout)
    assert figures["sessions"] == 2
    assert figures["gpu_cells"] == figures["cells"] == len(turns)
    assert "mean_error_s" in figures["recorded"]
