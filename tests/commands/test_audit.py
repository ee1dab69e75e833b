"""`jupyter gpu audit` reads the log: one line for each act, over its files, and as it grows."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.persistence.audit import AuditedAction
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.client.state_folder import make_state_folder
from fractional_gpu.commands.main import main
from fractional_gpu.host.peers import PeerCredentials
from tests.broker.live import BECOME_NOBODY, LiveBroker, live_broker

ROOT = Peer(credentials=PeerCredentials(7, 0, 0), token=None, admin=True, acting_for="ada")


def act(what: str, *outcomes: str, ago: timedelta = timedelta(), target: str = "GPU-0") -> str:
    """Return an act's lines."""
    one = AuditedAction(what=what, target=target, peer=ROOT, parameters={"evict_busy": True})
    entries = [json.loads(one.line(outcome)) for outcome in outcomes]
    at = (datetime.now(UTC) - ago).isoformat(timespec="milliseconds")
    return "".join(json.dumps({**entry, "time": at}) + "\n" for entry in entries)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of two files: three acts, the last of which has no outcome."""
    old, path = tmp_path / "audit.jsonl.20260101T000000.000000Z", tmp_path / "audit.jsonl"
    old.write_text(act("drain", "asked", "done", ago=timedelta(hours=3)))
    path.write_text(act("undrain", "asked", "refused") + act("move", "asked"))
    return path


def test_each_act_is_one_line_oldest_first(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--file", str(log)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("  drain GPU-0 evict_busy=true: done, by root (uid 0, process 7) for ada")
    assert "  undrain GPU-0 evict_busy=true: refused, by root" in second
    assert "  move GPU-0 evict_busy=true: requested, no outcome yet, by root" in third


def test_only_what_is_new_enough_is_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--file", str(log), "--since", "2h", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["act"], one["outcome"], one["acting_for"]) for one in entries] == [
        ("undrain", "refused", "ada"),
        ("move", "asked", "ada"),
    ]
    assert main(["audit", "--file", str(log), "--since", "long"]) == 2
    assert "invalid duration 'long'" in capsys.readouterr().err


def test_a_line_that_is_none_is_counted_and_the_others_are_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text('{"time":"20\n[]\n{"time": 1}\n' + act("pin", "done"))
    assert main(["audit", "--file", str(log)]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert shown.err == f"skipped 3 unreadable lines of {log} (cut short by a crash, or edited)\n"


def test_nothing_in_the_log_steers_the_terminal(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(act("evict", "done", target="\x1b[2J\nforged"))
    assert main(["audit", "--file", str(log)]) == 0
    assert '"\\u001b[2J\\nforged"' in capsys.readouterr().out.splitlines()[-1]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBroker]:
    with live_broker() as live:
        monkeypatch.setenv("JUPYTER_GPU_SOCKET", live.socket)
        yield live


def test_the_broker_says_where_its_log_is(live: LiveBroker, capsys: pytest.CaptureFixture[str]) -> None:
    with SeatClient(live.socket, acting_for="ada") as client:
        client.undrain("0")
    assert main(["audit"]) == 0
    assert "  undrain 0: done, by root (uid 0, process " in capsys.readouterr().out


def test_without_a_broker_it_is_where_the_configuration_says(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = str(log.parent / "broker.sock")
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", socket)
    shutil.copytree(log.parent, make_state_folder(socket), dirs_exist_ok=True)
    assert main(["audit"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_who_may_not_read_it_is_told_who_may(log: Path) -> None:
    # The first call imports everything while the interpreter's files can be read.
    program = f"""
import sys
from fractional_gpu.commands.main import main
main(["audit", "--file", "/nowhere"])
{BECOME_NOBODY}
sys.exit(main(["audit", "--file", {str(log)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    refusal = done.stderr.splitlines()[-1]
    assert refusal.startswith("jupyter gpu: cannot read the audit log ")
    assert "root and the user who runs the broker may" in refusal
