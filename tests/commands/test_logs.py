"""`jupyter gpu logs` reads the broker's log: over its files, filtered, as it grows, and never as a terminal's commands."""

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fractional_gpu.commands import logs
from fractional_gpu.commands.main import main


def written(level: str, text: str, *, ago: timedelta = timedelta()) -> str:
    """Return an entry as the broker writes it."""
    at = datetime.now().astimezone() - ago
    return f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d} {level} {text}\n"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of two files: three entries, one of them with a traceback."""
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(tmp_path / "broker.sock"))
    path = tmp_path / "broker.log"
    path.with_name("broker.log.1").write_text(written("INFO", "lease 0123abcd: suspended", ago=timedelta(hours=3)))
    path.write_text(written("ERROR", "it broke\nTraceback:\n  at once") + written("WARNING", "lease 4567cdef: slow"))
    return path


def texts(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what was printed as JSON: the entries' texts."""
    return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("log")
def test_entries_are_shown_oldest_first_over_the_logs_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs"]) == 0
    first, second, *more, last = capsys.readouterr().out.splitlines()
    assert first.endswith(" INFO    lease 0123abcd: suspended")
    assert second.endswith(" ERROR   it broke")
    assert more == ["    Traceback:", "      at once"]
    assert last.endswith(" WARNING lease 4567cdef: slow")


@pytest.mark.usefixtures("log")
def test_number_age_level_and_lease_choose_entries(capsys: pytest.CaptureFixture[str]) -> None:
    broke, slow = "it broke\nTraceback:\n  at once", "lease 4567cdef: slow"
    for arguments, chosen in (
        (["--lines", "1"], [slow]),
        (["--lines", "all", "--since", "2h"], [broke, slow]),
        (["--level", "warning"], [broke, slow]),
        (["--level", "error"], [broke]),
        (["4567cdef"], [slow]),
        (["4567cdef00112233"], [slow]),  # the log has the first eight characters of an id
        (["567cdef0"], []),
    ):
        assert main(["logs", "--json", *arguments]) == 0
        assert texts(capsys) == chosen, arguments


def test_nothing_in_the_log_controls_the_terminal(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_bytes(written("INFO", "kernel \x1b]0;owned\x07 \x9b2J and\r").encode() + b"\xff\n")
    assert main(["logs", "--lines", "1"]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07 \\x9b2J and\\r" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--lines", "many"], "--lines must be a number of entries, such as 500, or `all`, not 'many'"),
        (["--lines", "-1"], "--lines must be a number of entries, such as 500, or `all`, not '-1'"),
        (["--since", "long"], "invalid duration 'long'"),
        (["nb.ipynb"], "'nb.ipynb' is not the id of a lease"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_without_a_log_it_is_said_where_one_may_be(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in log.parent.iterdir():
        file.unlink()
    assert main(["logs"]) == 1
    assert "journalctl" in capsys.readouterr().err


def test_entries_that_come_are_followed_over_a_rotation_and_a_deletion(log: Path) -> None:
    def happens() -> Iterator[None]:
        with log.open("a") as file:
            file.write(written("INFO", "second")[:-4])
            file.flush()
            yield
            file.write("ond\n")
            file.write(written("INFO", "third"))
        log.rename(log.with_name("broker.log.1"))
        log.write_text(written("INFO", "fourth"))
        yield
        log.unlink()
        yield
        log.write_text(written("INFO", "fifth"))
        yield

    lines, steps = logs.growing_lines(log, [log.with_name("broker.log.1")]), happens()
    with closing(lines):
        entries = logs.entries_of(lines)
        assert len(list(logs.told(entries))) == 3
        found = logs.told(entries, lambda _: next(steps))
        assert [next(found).text for _ in range(4)] == ["second", "third", "fourth", "fifth"]
