"""What is charged, who sees it, and for which carbon, as configured."""

from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.config import carbon, load
from fractional_gpu.config.carbon import Carbon
from fractional_gpu.core.metering.tariffs import Basis, Tariff
from fractional_gpu.core.metering.usage import MJ_PER_KWH

DAY = 24 * 60
HOUR_S = 1_795_503_600  # 2026-11-24T07:00Z


def tariff(**policy: Any) -> Tariff:  # noqa: ANN401 - whatever a person writes
    return load(None, {"pools": {"default": policy}}).pools[0].tariff


def test_a_pool_without_a_price_charges_nothing() -> None:
    assert tariff() == Tariff(credit_milli=1000)
    assert tariff(charge="busy").currency == ""


def test_prices_differ_by_the_time_of_the_week_and_the_first_that_fits_counts() -> None:
    found = tariff(
        price="2.40 EUR", price_hours={"Sat-Sun 00:00-24:00": 0, "Fri 18:00-06:00": 1.5, "Mon-Sat 08:00-18:00": "3.60"}
    )
    friday, saturday = 4 * DAY, 5 * DAY
    at = {name: found.price_at(minute) for name, minute in {
        "Monday 07:45": 7 * 60 + 45, "Monday 08:00": 8 * 60, "Monday 18:00": 18 * 60,
        "Friday 23:00": friday + 23 * 60, "Saturday 03:00": saturday + 3 * 60, "Saturday 09:00": saturday + 9 * 60,
    }.items()}  # fmt: skip
    assert at == {
        "Monday 07:45": 2400,
        "Monday 08:00": 3600,
        "Monday 18:00": 2400,
        "Friday 23:00": 1500,
        "Saturday 03:00": 0,
        "Saturday 09:00": 0,
    }


def test_a_band_that_ends_after_midnight_on_sunday_goes_on_on_monday() -> None:
    found = tariff(price="1 EUR", price_hours={"Sun 22:00-02:00": 5})
    assert (found.price_at(7 * DAY - 1), found.price_at(60), found.price_at(120)) == (5000, 5000, 1000)


@pytest.mark.parametrize(
    ("basis", "state", "charged"),
    [
        ("held", {"held": True, "busy": False, "suspended": False}, 1000),
        ("held", {"held": False, "busy": False, "suspended": True}, 0),
        ("busy", {"held": True, "busy": False, "suspended": False}, 0),
        ("busy", {"held": True, "busy": True, "suspended": False}, 1000),
        ("reserved", {"held": False, "busy": False, "suspended": False}, 1000),
        ("reserved", {"held": False, "busy": False, "suspended": True}, 200),
    ],
)
def test_what_is_charged_follows_the_pools_terms(basis: str, state: dict[str, bool], charged: int) -> None:
    found = tariff(price="1 EUR", charge=basis, suspended_credit="80%")
    assert found.basis is Basis(basis)
    assert found.charged_milli(**state) == charged


def read(tmp_path: Path, text: str) -> Carbon:
    file = tmp_path / "co2.csv"
    file.write_text(text)
    return carbon.read(file)


def test_a_carbon_file_has_the_columns_of_an_export_and_fills_gaps_with_the_hour_before(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "Datetime (UTC),Country,Carbon intensity gCO2eq/kWh (direct)\n"
        "2026-11-24 08:00,DE,300.5\n\n2026-11-24 07:00,DE,100\n2026-11-24 10:00,DE,50\n",
    )
    assert found.changes
    by_hour = {hour: found.mg(MJ_PER_KWH, HOUR_S + hour * 3600) for hour in (-5, 0, 1, 2, 3, 99)}
    assert by_hour == {-5: 100_000, 0: 100_000, 1: 300_500, 2: 300_500, 3: 50_000, 99: 50_000}


def test_times_with_a_zone_are_that_zones(tmp_path: Path) -> None:
    found = read(tmp_path, "time,g_per_kwh\n2026-11-24T08:00+01:00,100\n2026-11-24T09:00+01:00,200\n")
    assert found.mg(MJ_PER_KWH, HOUR_S) == 100_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty; its first line must name the columns"),
        ("hour,grams\n1,2\n", "line 1: 'hour, grams' does not have the columns time and g_per_kwh"),
        ("time,g_per_kwh\n", "has no data; add one line per hour"),
        ("time,g_per_kwh\nnoon,300\n", "line 2: 'noon, 300'; expected a time such as"),
        ("time,g_per_kwh\n2026-11-24T08:00\n", "line 2: '2026-11-24T08:00'; expected"),
        ("time,g_per_kwh\n2026-11-24T08:00,nan\n", "line 2: 'nan'; expected a number from 0 to 100000 g"),
        ("time,g_per_kwh\n2026-11-24T08:00,-3\n", "line 2: '-3'; expected a number from 0 to 100000 g"),
    ],
)
def test_a_carbon_file_that_cannot_be_understood_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        read(tmp_path, text)
    assert str(tmp_path / "co2.csv") in str(error.value)
