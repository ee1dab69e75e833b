"""`jupyter gpu audit` reads the log: one line for each act, over its files, and as it grows."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.persistence.audit import AuditedAction
from fractional_gpu.commands.main import main
from fractional_gpu.host.peers import PeerCredentials
from tests.broker.live import BECOME_NOBODY

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
    assert "  move GPU-0 evict_busy=true: asked, and no outcome (yet), by root" in third


def test_only_what_is_new_enough_is_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--file", str(log), "--since", "2h", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["act"], one["outcome"], one["acting_for"]) for one in entries] == [
        ("undrain", "refused", "ada"),
        ("move", "asked", "ada"),
    ]
    assert main(["audit", "--file", str(log), "--since", "long"]) == 2
    assert "duration 'long' is not a duration" in capsys.readouterr().err


def test_a_line_that_is_none_is_counted_and_the_others_are_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text('{"time":"20\n[]\n{"time": 1}\n' + act("pin", "done"))
    assert main(["audit", "--file", str(log)]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert shown.err.endswith(" has 3 lines without an entry, cut short by a crash or changed\n")


def test_nothing_in_the_log_steers_the_terminal(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(act("evict", "done", target="\x1b[2J\nforged"))
    assert main(["audit", "--file", str(log)]) == 0
    assert '"\\u001b[2J\\nforged"' in capsys.readouterr().out.splitlines()[-1]


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
    assert refusal.startswith("jupyter gpu: you may not read the audit log ")
    assert "root and the user who runs the broker may" in refusal
