"""Two real kernels on one device, one of them suspended for the other: what they used, the same in each form of the report."""

import csv
import getpass
import io
import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from tests.support.world import Server, new_world

pytestmark = pytest.mark.promise("reports-add-up")

PRICED = """
c.GPUBroker.pools = {"default": {"price": "360000 EUR"}}
"""
WORK = """
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(64 << 20)
buffer.fill(b"held")
"""


def test_the_report_by_user_and_notebook_agrees_as_text_csv_json_and_html(tmp_path: Path) -> None:
    with new_world() as world, Server(world) as server:
        world.configure(PRICED)
        (name,) = world.install(750)
        first, second = server.start(name), server.start(name)
        first.must(WORK)
        second.must(WORK)  # both do not fit: the first one leaves
        first_id, second_id = (world.lease(one.kernel_id).lease_id for one in (first, second))
        assert world.await_state(first.kernel_id, "suspended").lease.saved_mib >= 64
        first.must("assert bytes(buffer.read(4)) == b'held'")
        first.shut_down()
        second.shut_down()
        assert world.status().leases == []

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
