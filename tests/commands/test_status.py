"""`jupyter gpu status`."""

import io
import json
import re
from pathlib import Path

import pytest

from fractional_gpu.commands.main import main
from fractional_gpu.commands.status import watch
from fractional_gpu.protocol.errors import InternalBrokerError
from fractional_gpu.protocol.status import HostStatus
from tests.commands.conftest import OwnBroker
from tests.commands.pictures import a_host, a_lease


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class EnoughError(Exception):
    """Ends a watch."""


def pictures_until_enough(out: io.StringIO, pictures: list[HostStatus | None], *, as_json: bool) -> list[float]:
    """Watch until the pictures run out and return the pauses between them."""
    pauses: list[float] = []
    left = list(pictures)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if not left:
            raise EnoughError

    with pytest.raises(EnoughError):
        watch(lambda: left.pop(0), out, as_json=as_json, socket="/run/b.sock", pause=pause)
    return pauses


def test_a_running_broker_is_shown(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.add("resident", label="train.ipynb")
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "simulated" in shown
    assert "train.ipynb" in shown


def test_json_has_what_the_broker_said(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    lease_id = broker.add("resident")
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["running"] is True
    assert shown["simulated"] is True
    assert [lease["lease"]["spec"]["lease_id"] for lease in shown["leases"]] == [lease_id]


def test_the_status_fits_a_terminal_and_other_readers_get_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "dumb")
    lease = a_lease(label="a/rather/long/path/to/a/notebook/that/does/not/fit/train.ipynb")
    for out, fits in ((Terminal(), True), (io.StringIO(), False)):
        pictures_until_enough(out, [a_host(leases=[lease])], as_json=False)
        assert (max(map(len, out.getvalue().splitlines())) <= 60) is fits


def test_no_broker_is_an_ordinary_answer_and_none_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = tmp_path / "b.sock"
    assert main(["status", "--socket", str(socket)]) == 0
    assert capsys.readouterr().out == (
        f"No broker is running on {socket}; the first kernel that needs a GPU starts one.\n"
    )
    assert main(["status", "--json", "--socket", str(socket)]) == 0
    assert capsys.readouterr().out == '{"running": false}\n'
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_fails_is_not_called_absent(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.fail["status"] = InternalBrokerError("the ledger is on fire")
    assert main(["status"]) == 1
    assert capsys.readouterr().err == "jupyter gpu: the ledger is on fire\n"


def test_a_watch_on_a_terminal_redraws_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    assert pictures_until_enough(out, [a_host(), None], as_json=False) == [2.0, 2.0]
    enter, *screens, leave = re.split(r"\x1b\[(?:\?1049[hl]|H\x1b\[2J)", out.getvalue())
    assert out.getvalue().startswith("\x1b[?1049h"), "the alternate screen: what was on the other one stays"
    assert out.getvalue().endswith("\x1b[?1049l")
    assert (enter, leave, len(screens)) == ("", "", 3)
    assert screens[1].startswith("GPUs\n")
    assert screens[2].startswith("No broker is running")


def test_a_watch_for_programs_is_one_object_a_line() -> None:
    out = Terminal()
    pictures_until_enough(out, [None, a_host()], as_json=True)
    lines = out.getvalue().splitlines()
    assert [json.loads(line)["running"] for line in lines] == [False, True]


def test_ctrl_c_ends_a_watch_quietly(
    broker: OwnBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fractional_gpu.commands.status.watch", interrupted)
    assert main(["status", "--watch"]) == 0
    assert capsys.readouterr() == ("", "")
    assert broker.calls == []
