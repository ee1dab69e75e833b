"""Lines and tables: their form, and that other users' texts cannot appear as anything but text."""

import io
from typing import Any

import msgspec
import pytest

from fractional_gpu.commands.main import main
from fractional_gpu.commands.terminal.render import lease_name, render_status
from fractional_gpu.commands.terminal.text import fitted, harmless, line, plain, table
from fractional_gpu.protocol.errors import NoRoomError
from fractional_gpu.protocol.status import LeftProcess, SeatStatus, SeatWait, Stranger
from tests.commands.conftest import OwnBroker
from tests.commands.pictures import a_device, a_host, a_lease

HOSTILE = "a\x1b[2J\x1b]0;t\x07\x9b31m\r\n\t\b\u202e\u2028\udcff[bold]b[/bold][link=x]:smile:"
SHOWN = r"a\x1b[2J\x1b]0;t\x07\x9b31m\r\n\t\x08\u202e\u2028\udcff[bold]b[/bold][link=x]:smile:"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def hostile(message: Any) -> Any:  # noqa: ANN401 - any message, with every text in it replaced
    """Return the message with every text that has no meaning to the program replaced by a hostile one."""
    changed: dict[str, object] = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, str) and name not in {"state", "kind"}:
            changed[name] = HOSTILE
        elif isinstance(value, list):
            changed[name] = [hostile(one) if isinstance(one, msgspec.Struct) else one for one in value]
    return msgspec.structs.replace(message, **changed)


STATUS = hostile(
    a_host(
        devices=[a_device(stranger_mib=5, strangers=[Stranger(pid=1, user="eve", used_mib=5)])],
        leases=[
            a_lease(position=1, unsuspendable_reason="x", left=[LeftProcess(pid=3, command="python", used_mib=1)]),
            a_lease(kind="command", goes_away_in_ms=30_000, lost_because="x"),
        ],
        seats=[
            SeatStatus(
                seat_id="s",
                owner="eve",
                server="x",
                group="g",
                pool="p",
                fraction_milli=250,
                memory_mib=1,
                device_id=None,
                priority=0,
                weight=1,
                max_kernels=1,
                uid=None,
                kernels=1,
                used_milli=250,
                confirmed=True,
                age_ms=1,
                expires_ms=None,
                warning="x",
            )
        ],
        seat_queue=[
            SeatWait(position=1, owner="eve", server="x", pool="p", fraction_milli=250, memory_mib=1, waited_ms=1)
        ],
        trouble="x",
    )
)


def test_what_others_chose_cannot_control_a_terminal() -> None:
    assert harmless(HOSTILE) == SHOWN
    assert plain([line(HOSTILE)]) == plain(fitted([HOSTILE], None)) == f"{SHOWN}\n"
    assert plain(table((HOSTILE,), [(HOSTILE,)], indent="")) == f"{SHOWN}\n{SHOWN}\n"


@pytest.mark.parametrize("width", [None, 80, 200])
def test_a_status_of_hostile_names_is_only_text(width: int | None) -> None:
    text = plain(render_status(STATUS, width))
    assert all(one.isprintable() for one in text.split("\n"))
    assert "[bold]b[/bold]" in text.replace("\n", "")


def test_sentences_with_hostile_names_are_only_text(
    broker: OwnBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lease_name(a_lease(label="a\x1b[31m")) == r"a\x1b[31m (3f2a9c1b)"
    label = HOSTILE.replace("\udcff", "")  # not possible in JSON
    broker.add("resident", label=label)
    assert main(["suspend", "--all"]) == 0
    monkeypatch.setitem(broker.fail, "status", NoRoomError(f"no room for {label}"))
    assert main(["status"]) == 1
    told = capsys.readouterr()
    assert harmless(label) in told.out
    assert all(one.isprintable() for one in (told.out + told.err).split("\n"))


ROWS = [("ada", "a/rather/long/path/to/a/notebook.ipynb", "1.50"), ("鈴木", "b.ipynb", "12.00")]


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_narrow_table_breaks_its_cells_and_loses_nothing(width: int) -> None:
    narrow = table(("WHO", "WHAT", "HOURS"), ROWS, width=width, figures_from=2)
    assert max(one.cell_len for one in narrow) <= width
    wide = table(("WHO", "WHAT", "HOURS"), ROWS, figures_from=2)
    assert sorted("".join(plain(narrow).split())) == sorted("".join(plain(wide).split()))


def test_a_long_line_is_wrapped_at_blanks_and_a_path_stays_whole() -> None:
    path = "/home/ada/projects/2026/vision/experiments/train.ipynb"
    wrapped = plain(fitted([f"  the notebook {path} waits for the GPU"], 30)).splitlines()
    assert wrapped == ["  the notebook", f"    {path}", "    waits for the GPU"]
    assert plain(fitted(["鈴木 " * 8], 21)).splitlines() == ["鈴木 鈴木 鈴木 鈴木", "  鈴木 鈴木 鈴木 鈴木"]
