"""Which user may see which sums of use, grouped by what, in local days, and with which carbon figure."""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from zoneinfo import ZoneInfo

import pytest

from fractional_gpu.broker.accounting.reports import Reader, ReportQuery, UsageReports
from fractional_gpu.core.metering.usage import MJ_PER_KWH, Party, Usage, UsageKey, UsageRow
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.protocol.accounts import UsageEntry

pytestmark = pytest.mark.promise("usage-privacy")

T = TypeVar("T")
BERLIN = ZoneInfo("Europe/Berlin")
EVER = 2**40
ADMIN = Reader(administrator=True)
ADA = Reader(owner="ada", group="physics")
HUB_ADA = Reader(owner="ada", seated=True, group="biology")


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp())


def row(owner: str, group: str = "", *, seated: bool = False, when: str = "2026-11-24T08:00", **more: Any) -> UsageRow:  # noqa: ANN401
    given = {
        "label": f"{owner}.ipynb",
        "lease": f"{owner}-1",
        "energy_mj": 0,
        "charge_milli": 1,
        "currency": "EUR",
        **more,
    }
    if not owner:
        given["label"] = given["lease"] = ""
    return UsageRow(
        UsageKey(at(when), given["lease"], "gpu-0", given["currency"]),
        Party(pool="p", owner=owner, group=group, label=given["label"], seated=seated),
        Usage(charge_milli=given["charge_milli"], energy_mj=given["energy_mj"]),
    )


class World:
    """A ledger with rows, and reports of it under each setting."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.wrote = 0

    def has(self, *rows: UsageRow) -> None:
        self.ledger.add_metered(rows, "{}")

    def reports(self, visible: str = "own", carbon: float | Path | None = None) -> UsageReports:
        async def read(do: Callable[[], T]) -> T:
            return do()

        def write() -> None:
            self.wrote += 1

        writer = cast("Any", SimpleNamespace(ledger=self.ledger, read_aside=read))
        return UsageReports(cast("Any", SimpleNamespace(write=write)), writer, visible=visible, carbon_setting=carbon)

    async def sums(
        self, reader: Reader, by: Sequence[str] = (), visible: str = "own", **only: str
    ) -> dict[tuple[str, ...], int]:
        """Return the charges by the requested key; `hub` follows a hub user's name."""
        entries, _, _ = await self.reports(visible).answer(reader, ReportQuery(tuple(by), 0, EVER, only))
        return {
            tuple(value for value in one.of.values() if value != "machine"): one.usage.charge_milli for one in entries
        }


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    with Ledger.open(tmp_path / "state" / "ledger.sqlite") as ledger:
        yield World(ledger)
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def busy(world: World) -> World:
    """Two kernels of physics, one of biology, ada's from the hub, and the pool's own use."""
    world.has(
        row("ada", "physics", charge_milli=1),
        row("grace", "physics", charge_milli=20),
        row("mary", "biology", charge_milli=300),
        row("ada", "biology", seated=True, charge_milli=4000, lease="hub-ada", label="hub.ipynb"),
        row("", charge_milli=0, energy_mj=7),
    )
    return world


async def test_a_user_sees_their_own_figures(busy: World) -> None:
    assert await busy.sums(ADA, ["user"]) == {("ada",): 1}
    assert await busy.sums(ADA) == {(): 1}


async def test_a_user_of_the_hub_and_one_of_the_machine_with_the_same_name_are_two(busy: World) -> None:
    assert await busy.sums(HUB_ADA, ["user", "notebook"]) == {("ada", "hub.ipynb", "hub"): 4000}
    assert await busy.sums(ADA, ["user", "notebook"]) == {("ada", "ada.ipynb"): 1}


async def test_where_groups_are_visible_a_user_sees_each_of_the_group(busy: World) -> None:
    assert await busy.sums(ADA, ["user"], "group") == {("ada",): 1, ("grace",): 20}
    assert await busy.sums(HUB_ADA, ["user"], "group") == {("ada", "hub"): 4000, ("mary",): 300}


async def test_a_user_without_a_group_sees_their_own_where_groups_are_visible(busy: World) -> None:
    nobody = Reader(owner="grace")
    assert busy.reports("group").scope(nobody, ["user"]) == "own"
    assert await busy.sums(nobody, ["user"], "group") == {("grace",): 20}


async def test_where_all_is_visible_a_user_sees_all_and_the_pools_own_part(busy: World) -> None:
    assert await busy.sums(ADA, ["group"], "all") == {("",): 0, ("biology",): 4300, ("physics",): 21}


@pytest.mark.parametrize("visible", ["own", "group", "all"])
@pytest.mark.parametrize("by", ["notebook", "lease"])
async def test_others_notebooks_are_never_shown(busy: World, visible: str, by: str) -> None:
    assert busy.reports(visible).scope(ADA, ["user", by]) == "own"
    assert list(await busy.sums(ADA, ["user", by], visible)) == [
        ("ada", {"notebook": "ada.ipynb", "lease": "ada-1"}[by])
    ]


async def test_to_ask_for_what_one_may_not_see_shows_nothing_and_says_so(busy: World) -> None:
    assert await busy.sums(ADA, ["user"], user="grace") == {}
    assert await busy.sums(ADA, ["user"], "group", group="biology") == {}
    assert await busy.sums(ADA, ["user"], lease="mary-1") == {}
    assert await busy.sums(ADA, ["user"], user="ada") == {("ada",): 1}
    assert await busy.sums(ADA, ["user"], "group", user="grace") == {("grace",): 20}
    _, _, note = await busy.reports().answer(ADA, ReportQuery((), 0, EVER, {"user": "grace"}))
    assert note.startswith("You may not see these figures")


async def test_an_administrator_sees_everything(busy: World) -> None:
    assert busy.reports().scope(ADMIN, ["lease"]) == "all"
    assert await busy.sums(ADMIN, ["lease"]) == {
        ("",): 0,
        ("ada-1",): 1,
        ("grace-1",): 20,
        ("hub-ada",): 4000,
        ("mary-1",): 300,
    }
    assert await busy.sums(ADMIN, user="grace") == {(): 20}


async def test_days_and_months_are_local(world: World) -> None:
    world.has(
        row("ada", when="2026-10-31T23:00", charge_milli=1),
        row("ada", when="2026-11-01T00:00", charge_milli=20),
        row("ada", when="2026-11-01T23:00", charge_milli=300),
        row("ada", when="2026-11-02T00:00", charge_milli=4000),
    )
    assert await world.sums(ADMIN, ["day"]) == {("2026-10-31",): 1, ("2026-11-01",): 320, ("2026-11-02",): 4000}
    assert await world.sums(ADMIN, ["month"]) == {("2026-10",): 1, ("2026-11",): 4320}
    assert list(await world.sums(ADMIN, ["hour"]))[:2] == [("2026-10-31T23:00+0100",), ("2026-11-01T00:00+0100",)]


async def test_only_hours_that_begin_within_the_time_count(world: World) -> None:
    world.has(*(row("ada", when=f"2026-11-24T{hour:02}:00", charge_milli=10**hour) for hour in range(4)))
    entries, _, _ = await world.reports().answer(
        ADMIN, ReportQuery((), at("2026-11-24T01:00"), at("2026-11-24T03:00"), {})
    )
    assert [one.usage.charge_milli for one in entries] == [110]


async def carbon_of(world: World, setting: float | Path | None) -> tuple[list[UsageEntry], str, str]:
    world.has(
        row("ada", when="2026-11-24T08:00", energy_mj=MJ_PER_KWH),
        row("ada", when="2026-11-24T09:00", energy_mj=2 * MJ_PER_KWH),
    )
    entries, carbon, note = await world.reports(carbon=setting).answer(ADMIN, ReportQuery(("user",), 0, EVER, {}))
    return entries, carbon.text if carbon is not None else "", note


async def test_carbon_of_a_file_counts_hour_by_hour_even_where_no_time_is_asked(world: World, tmp_path: Path) -> None:
    file = tmp_path / "carbon.csv"
    file.write_text("time,g_per_kwh\n2026-11-24T07:00+00:00,100\n2026-11-24T08:00+00:00,300\n")
    entries, said, _ = await carbon_of(world, file)
    assert [(one.of, one.carbon_mg) for one in entries] == [
        ({"user": "ada", "account": "machine"}, 100_000 + 2 * 300_000)
    ]
    assert "carbon.csv" in said
