"""A simulated week as a report: what the simulator says was used is what the report says, and the page is worth a look."""

import csv
import io
import json
from decimal import Decimal
from pathlib import Path

import pytest

from fractional_gpu.commands.main import main
from tests.e2e.browser import opened_browser
from tests.support.screenshots import SCREENSHOTS, take

PRICES = """\
c.GPUBroker.pools = {
    "large": {"devices": ["0", "1", "2"], "price": "2.40 EUR", "price_hours": {"Mon-Fri 08:00-18:00": 3.60}},
    "small": {"devices": ["3"], "price": "0.90 EUR", "charge": "reserved", "suspended_credit": "80%"},
}
c.GPUBroker.default_pool = "large"
"""
WEEK = (
    *("--users", "12", "--days", "7", "--set", "weekends=true", "--set", "weekend_users=10", "--set", "several_gpus=0"),
    *("--devices", "4x80GiB"),
    *("--set", "groups=physics:2,biology:1,teaching:1@small", "--set", "power_noise=5", "--json"),
)  # fmt: skip


def test_a_report_of_a_simulated_week_says_what_the_simulator_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices, usage = tmp_path / "prices.py", tmp_path / "usage.json"
    prices.write_text(PRICES)

    def said(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    simulated = json.loads(said("simulate", *WEEK, "--policy", str(prices), "--set", f"usage={usage}"))["usage"]
    report = ("report", "--from", str(usage), "--by")
    for pool, figures in simulated.items():
        (total,) = json.loads(said(*report, "user", "--pool", pool, "--json"))["totals"]
        assert total["currency"] == figures["currency"] == "EUR"
        assert round(total["charge_milli"] / 1000, 3) == figures["charged"] > 0
        assert round(total["occupied_us"] / 3.6e9, 3) == figures["device_hours"]
        assert round(total["held_milli_gpu_ms"] / 3.6e9, 3) == figures["held_gpu_hours"]
        assert round(total["energy_mj"] / 3.6e9, 3) == figures["energy_kwh"] > 0
    rows = csv.DictReader(io.StringIO(said(*report, "lease", "--csv")))
    charged = sum(Decimal(row["BilledCost"]) for row in rows)
    assert charged == sum(Decimal(str(one["charged"])) for one in simulated.values())

    page = tmp_path / "use.html"
    said(*report, "user", "--html", "--output", str(page))
    assert f"{charged:,.3f} EUR" in page.read_text()
    if SCREENSHOTS:
        with opened_browser() as browser:
            opened = browser.new_page(viewport={"width": 1000, "height": 760}, color_scheme="light")
            opened.goto(page.as_uri())
            take(opened, "report")
