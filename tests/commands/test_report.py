"""`jupyter gpu report`: one report as text, CSV, JSON and HTML, from a broker and from a file, and what is refused."""

import csv
import io
import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.commands.main import main
from fractional_gpu.core.forecasts.habits import HabitKey, HabitKind, Share, ShareDay
from fractional_gpu.core.metering.usage import FIGURES, SHARE_HOUR, Party, Usage, UsageKey, UsageRow
from tests.broker.live import LiveBroker, live_broker

HOUR_S = 1_795_503_600  # 2026-11-24T07:00Z, a Tuesday
Said = Callable[..., str]
ADA = Party("large", "ada", "physics", "train.ipynb")
ROWS = (
    ("a1", "gpu-0", "EUR", ADA, Usage(held_share=SHARE_HOUR // 3, busy_share=1, charge_milli=333)),
    ("a1", "", "EUR", ADA, Usage(suspended_share=SHARE_HOUR, moved_mib=2048, charge_milli=1)),
    ("g1", "gpu-1", "EUR", Party("large", "grace", "", "=2+3"), Usage(held_share=SHARE_HOUR // 3, energy_mj=10**9, charge_milli=667)),
    ("m1", "gpu-2", "USD", Party("small", "mary", "biology", "m.ipynb"), Usage(held_share=SHARE_HOUR // 3, charge_milli=5)),
    ("", "gpu-0", "EUR", Party("large"), Usage(occupied_us=3_600_000_000)),
)  # fmt: skip


def rows() -> list[UsageRow]:
    """Four kernels of three users and what no lease held, over two days."""
    return [
        UsageRow(UsageKey(HOUR_S + 40_000 * number // 3600 * 3600, lease, device, currency), party, usage)
        for number, (lease, device, currency, party, usage) in enumerate(ROWS)
    ]


def plain(row: UsageRow) -> dict[str, Any]:
    figures = {name: getattr(row.usage, name) for name in FIGURES if getattr(row.usage, name)}
    return {"key": row.key._asdict(), "party": asdict(row.party), "figures": figures}


def file_of(path: Path, found: Sequence[dict[str, Any]], **more: Any) -> Path:  # noqa: ANN401
    head = {
        "format": "jupyter-gpu-usage",
        "version": 1,
        "begins_s": HOUR_S - 3600,
        "ends_s": HOUR_S + 172_800,
        "pools": {},
    }
    path.write_text(json.dumps(head | {"rows": found} | more))
    return path


@pytest.fixture
def usage(tmp_path: Path) -> Path:
    return file_of(tmp_path / "usage.json", [plain(row) for row in rows()])


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def run(*arguments: object, code: int = 0) -> str:
        found = main(["report", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert found == code, err
        return out if code == 0 else err

    return run


def test_text_has_parts_what_no_lease_held_and_a_total_for_each_currency(usage: Path, said: Said) -> None:
    lines = said("--from", usage, "--by", "user,pool").splitlines()
    assert lines[0] == (
        "GPU use from 2026-11-24 06:00 to 2026-11-26 07:00. The figures of all users; simulated: no real GPU was used."
    )
    table = [line.split() for line in lines[2:9]]
    assert table[0][:4] == ["USER", "POOL", "RESERVED", "HELD"]
    assert [(row[0], row[3]) for row in table[1:3]] == [("ada", "0.33"), ("grace", "0.34")]
    assert table[3][:4] == ["no", "lease", "0.00", "0.00"]
    assert [row[0] for row in table[4:]] == ["mary", "total", "total"]
    assert [re.findall(r"[\d.]+ [A-Z]{3}", line) for line in lines[3:9]] == [
        ["0.334 EUR"],
        ["0.667 EUR"],
        ["0.000 EUR"],
        ["0.005 USD"],
        ["1.001 EUR"],
        ["0.005 USD"],
    ]


def test_the_forms_of_a_report_agree(usage: Path, said: Said, tmp_path: Path) -> None:
    found = json.loads(said("--from", usage, "--by", "notebook", "--json"))
    assert {one["currency"]: one["charge_milli"] for one in found["totals"]} == {"EUR": 1001, "USD": 5}
    assert {one["of"]["notebook"]: one["charge_milli"] for one in found["entries"]} == {
        "=2+3": 667,
        "m.ipynb": 5,
        "train.ipynb": 334,
    }
    csv_rows = list(csv.DictReader(io.StringIO(said("--from", usage, "--by", "lease,notebook", "--csv"))))
    assert sum(Decimal(row["BilledCost"]) for row in csv_rows if row["BillingCurrency"] == "EUR") == Decimal("1.001")
    page = tmp_path / "use.html"
    assert said("--from", usage, "--by", "notebook", "--html", "--output", page) == ""
    text = page.read_text()
    assert "1.001 EUR" in text
    assert "0.005 USD" in text
    assert "(simulated)" in text
    assert not re.search(r"<script|https?://|@import|url\(", text)


def test_chargeback_rows_are_what_focus_wants(usage: Path, said: Said) -> None:
    (first,) = list(
        csv.DictReader(io.StringIO(said("--from", usage, "--by", "lease,notebook", "--user", "ada", "--csv")))
    )
    assert {name: first[name] for name in ("BilledCost", "BillingCurrency", "BillingAccountId", "SubAccountId")} == {
        "BilledCost": "0.334",
        "BillingCurrency": "EUR",
        "BillingAccountId": "group/physics",
        "SubAccountId": "user/ada",
    }
    assert (first["ChargePeriodStart"], first["ChargePeriodEnd"]) == ("2026-11-24T00:00:00Z", "2026-11-25T00:00:00Z")
    assert (first["BillingPeriodStart"], first["BillingPeriodEnd"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert (first["ConsumedQuantity"], first["ConsumedUnit"]) == ("0.333333", "GPU-Hours")
    assert json.loads(first["Tags"]) == {
        "user": "ada",
        "account": "machine",
        "group": "physics",
        "pool": "large",
        "notebook": "train.ipynb",
        "lease": "a1",
    }


def test_a_notebook_is_no_formula_for_a_spreadsheet_and_no_html_for_a_browser(tmp_path: Path, said: Said) -> None:
    row = plain(rows()[2])
    row["party"] |= {"label": "=2+3", "owner": "<img src=x onerror=alert(1)>"}
    usage = file_of(tmp_path / "usage.json", [row])
    (found,) = csv.DictReader(io.StringIO(said("--from", usage, "--by", "lease,notebook", "--csv")))
    assert found["ResourceName"] == "'=2+3"
    assert "<img" not in said("--from", usage, "--html")


def test_filters_and_times_leave_what_fits(usage: Path, said: Said) -> None:
    def users(*arguments: str) -> list[str]:
        return [one["of"]["user"] for one in json.loads(said("--from", usage, "--json", *arguments))["entries"]]

    assert users() == ["ada", "grace", "mary"]
    assert users("--pool", "small") == ["mary"]
    assert users("--group", "physics") == ["ada"]
    assert users("--device", "gpu-1") == ["grace"]
    assert users("--device", "1") == ["grace"], "the number of a device"
    assert "--device 'gpu' matches gpu-0, gpu-1, gpu-2; choose one of them" in said(
        "--from", usage, "--device", "gpu", code=1
    )
    assert users("--user", "nobody") == []
    assert users("--since", "2026-11-25") == ["grace", "mary"]
    assert users("--until", "2026-11-24T08:00") == ["ada"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--by", "colour"), 2, "invalid value for --by: 'colour'; choose from hour, day,"),
        (("--by", "user,user"), 2, "invalid value for --by: 'user,user'; choose from"),
        (("--by", ""), 2, "invalid value for --by: ''; choose from"),
        (("--since", "soon"), 2, "--since 'soon' is not a valid time; expected today, yesterday"),
        (("--since", "today", "--until", "2026-01-01"), 2, "give a later --until"),
        (("--user", ""), 2, "--user is empty; give a value, or leave the option out to include all"),
        (("--socket", "/nowhere"), 2, "leave one of them out"),
        (("--output", "/nowhere/use.txt"), 1, "/nowhere/use.txt cannot be written: No such file or directory"),
    ],
)
def test_wrong_arguments_get_one_clear_sentence(
    usage: Path, said: Said, arguments: tuple[str, ...], code: int, says: str
) -> None:
    found = said("--from", usage, *arguments, code=code)
    assert says in found
    assert found.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no JSON", "is not a file of metered rows"),
        ("[]", "is not a file of metered rows"),
        ("{}", "missing required field `format`"),
        ('{"format": "jupyter-gpu-usage", "version": 2}', "Invalid enum value 2"),
        (
            '{"format": "jupyter-gpu-usage", "version": 1, "begins_s": 1, "ends_s": 2, "rows": [{}]}',
            "missing required field `key`",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, said: Said, content: str, says: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    found = said("--from", file, code=1)
    assert says in found
    assert "jupyter gpu simulate" in found
    assert "No such file" in said("--from", tmp_path / "gone.json", code=1)


@pytest.fixture
def live() -> Any:  # noqa: ANN401 - a context manager's value
    with live_broker(devices="2x1GiB") as live:

        async def add() -> None:
            kept = [
                *rows(),
                *(
                    UsageRow(UsageKey(HOUR_S, "", one, ""), Party("p"), Usage(occupied_us=1))
                    for one in live.broker.devices
                ),
            ]
            await live.broker.writer.submit(lambda: live.disk.add_metered(kept, "{}"))

        live.on_loop(add)
        yield live


def test_the_broker_and_a_file_of_the_same_rows_give_the_same_report(
    live: LiveBroker, usage: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time = ("--since", "2026-11-24T06:00Z", "--until", "2026-11-26T07:00Z", "--by", "user,day", "--pool", "large")
    of_broker = json.loads(said("--socket", live.socket, "--json", *time))
    of_file = json.loads(said("--from", usage, "--json", *time))
    assert of_broker.pop("devices").keys() == live.broker.devices.keys()
    of_file.pop("devices")
    assert of_broker == of_file


@pytest.fixture
def broker_in_utc(monkeypatch: pytest.MonkeyPatch, live: LiveBroker) -> Iterator[LiveBroker]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield live
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("by", "begins"),
    [
        ("user", ["2026-11-24T00:00:00Z", "2026-11-25T00:00:00Z"]),
        ("hour", ["2026-11-24T07:00:00Z", "2026-11-24T18:00:00Z", "2026-11-25T05:00:00Z"]),
    ],
)
def test_days_and_months_of_chargeback_rows_are_those_of_the_broker_wherever_the_reader_is(
    broker_in_utc: LiveBroker, by: str, begins: list[str]
) -> None:
    asked = ("--csv", "--by", by, "--pool", "large", "--since", "2026-11-24T00:00Z", "--until", "2026-11-26T00:00Z")
    command = [sys.executable, "-m", "fractional_gpu.commands.main", "report", "--socket", str(broker_in_utc.socket)]
    there = os.environ | {"TZ": "America/New_York"}
    done = subprocess.run([*command, *asked], check=True, stdout=subprocess.PIPE, text=True, env=there)
    found = list(csv.DictReader(io.StringIO(done.stdout)))
    assert sorted({one["ChargePeriodStart"] for one in found}) == begins
    assert {(one["BillingPeriodStart"], one["BillingPeriodEnd"]) for one in found} == {
        ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    }


def test_notebooks_for_which_another_share_is_suggested_are_listed_below_the_table(
    live: LiveBroker, said: Said
) -> None:
    today, whole = int(time.time()) // 86_400, Share(1000, 1024)
    me = pwd.getpwuid(os.getuid()).pw_name

    async def work() -> None:
        for owner in (me, "other"):
            key = HabitKey("default", owner, False, HabitKind.NOTEBOOK, "train.ipynb")
            for ago in range(10):
                one = ShareDay(today - ago, whole, 100, 3_600_000, 1_800_000, 5, {2: 1_800_000})
                live.broker.habits.recorder.load(key, one)

    live.on_loop(work)
    text = said("--socket", live.socket, "--by", "notebook", "--user", me)
    assert "Advice on shares" in text
    assert "1/8 GPU" in text
    assert "would have been short of memory on 0 of 10 days" in " ".join(text.split())
    (advice,) = json.loads(said("--socket", live.socket, "--json", "--by", "notebook", "--user", me))["advice"]
    assert (advice["notebook"], advice["figures"]["verdict"], advice["figures"]["risk"]["share"][0]) == (
        "train.ipynb",
        "smaller",
        125,
    )
    assert "Advice" not in said("--socket", live.socket, "--by", "user"), (
        "notebooks' names are shown where they are asked for"
    )


def test_without_a_broker_it_says_what_to_do(tmp_path: Path, said: Said) -> None:
    found = said("--socket", tmp_path / "none.sock", code=1)
    assert "no broker is running on" in found
    assert "--from" in found
