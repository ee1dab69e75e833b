"""`jupyter gpu simulate --usage` from the outside: a week of groups in two pools, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.commands.main import main
from fractional_gpu.core.metering.usage import SHARE_HOUR
from fractional_gpu.reports.rows_file import read as read_rows
from fractional_gpu.reports.rows_file import rows_of
from fractional_gpu.simulator.metering import DAY_MS

PRICES = """\
c.GPUBroker.pools = {
    "large": {"devices": ["0", "1"], "price": "2.40 EUR", "price_hours": {"Mon-Fri 08:00-18:00": 3.60}},
    "small": {"devices": ["2"], "price": "0.90 EUR", "charge": "reserved", "suspended_credit": "80%"},
}
c.GPUBroker.default_pool = "large"
"""
WEEK = (
    "--users",
    "12",
    "--days",
    "7",
    "--set",
    "weekends=true",
    "--set",
    "weekend_users=20",
    "--set",
    "several_gpus=0",
    "--devices",
    "3x80GiB",
)
GROUPS = ("--set", "groups=physics:2,biology:1,teaching:1@small")


@pytest.fixture
def prices(tmp_path: Path) -> str:
    (tmp_path / "prices.py").write_text(PRICES)
    return str(tmp_path / "prices.py")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    found.pop("wall_s")
    return found


def test_a_week_of_three_groups_in_two_pools(prices: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "usage.json"
    run = (*WEEK, *GROUPS, "--policy", prices)
    without, found = (
        simulated(capsys, *run),
        simulated(capsys, *run, "--set", f"usage={file}", "--set", "power_noise=5"),
    )
    usage = found.pop("usage")
    assert found == without
    head = json.loads(file.read_text())
    days, rest = divmod(head["ends_s"] - head["begins_s"], DAY_MS // 1000)
    assert (days in (7, 8), rest) == (True, 0)
    assert head["pools"]["large"]["devices"] == ["simulated-0", "simulated-1"]
    assert head["pools"]["small"]["tariff"]["basis"] == "reserved"
    rows = rows_of(read_rows(file.read_bytes(), str(file)))
    assert {row.party.group for row in rows} == {"", "physics", "biology", "teaching"}
    for pool, devices in (("large", 2), ("small", 1)):
        mine = [row for row in rows if row.party.pool == pool]
        assert sum(row.usage.occupied_us for row in mine) == devices * days * DAY_MS * 1000
        assert usage[pool]["device_hours"] == devices * days * 24
        assert usage[pool]["charged"] == round(sum(row.usage.charge_milli for row in mine) / 1000, 3) > 0
        assert usage[pool]["charged"] <= usage[pool]["charged_if_resident"] <= usage[pool]["charged_for_whole_devices"]
        assert usage[pool]["energy_kwh"] == round(sum(row.usage.energy_mj for row in mine) / 3.6e9, 3)
    assert any(one["charged"] < one["charged_if_resident"] for one in usage.values())
    held = [0] * 7
    for row in rows:
        day = (row.key.hour_s - head["begins_s"]) * 1000 // DAY_MS
        if day < 7:
            held[day] += row.usage.busy_ms
    assert max(held[5:]) < min(held[:5])
    weekdays = [row for row in rows if row.key.hour_s - head["begins_s"] < 5 * 86_400 and row.party.pool == "large"]
    prices_milli = {
        row.key.hour_s // 3600 % 24: row.usage.charge_milli * SHARE_HOUR / row.usage.held_share
        for row in weekdays
        if row.usage.held_share > SHARE_HOUR // 20
    }
    assert prices_milli[10] == pytest.approx(3600, rel=0.02)
    assert prices_milli[19] == pytest.approx(2400, rel=0.02)
