"""The log does not repeat equal lines without end, and a log that cannot be written harms nothing."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fractional_gpu.broker.process import logs
from fractional_gpu.broker.process.logs import RepeatFilter, _PrivateLog

pytestmark = pytest.mark.promise("full-disk-told")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[logging.Logger, list[str], Clock]]:
    written: list[str] = []
    clock = Clock()
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=clock))

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    handler = Kept()
    handler.addFilter(RepeatFilter())
    logger = logging.Logger("test")  # noqa: LOG001 - of this test alone
    logger.addHandler(handler)
    yield logger, written, clock
    logger.removeHandler(handler)


def test_equal_lines_are_counted_and_different_ones_are_all_written(
    lines: tuple[logging.Logger, list[str], Clock],
) -> None:
    logger, written, _ = lines
    for number in range(3467):
        logger.error("cannot write the ledger: %s", "full")
        logger.error("another one: %d", number)
    assert written.count("cannot write the ledger: full") == 3
    assert len(written) == 3 + 3467


def test_after_a_minute_one_line_says_how_many_there_were(lines: tuple[logging.Logger, list[str], Clock]) -> None:
    logger, written, clock = lines
    for _ in range(3467):
        logger.error("full")
    clock.now_s = 59.0
    logger.error("full")
    assert written == ["full"] * 3
    clock.now_s = 60.0
    logger.error("full")
    logger.error("full")
    assert written == ["full"] * 3 + ["full (repeated 3466 times)"]
    clock.now_s = 200.0
    logger.error("full")
    logger.warning("full")
    assert written[4:] == ["full (repeated 2 times)", "full"]


def test_a_log_on_a_full_disk_loses_lines_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = _PrivateLog(tmp_path / "broker.log")
    logger = logging.Logger("test")  # noqa: LOG001 - of this test alone
    logger.addHandler(handler)
    logger.info("before")
    true_path, handler.baseFilename = handler.baseFilename, "/dev/full"
    monkeypatch.setattr(os, "fchmod", lambda _descriptor, _mode: None)
    handler.close()
    for _ in range(5):
        logger.info("lost")
    handler.baseFilename = true_path
    handler.close()
    logger.info("after")
    handler.close()
    assert (tmp_path / "broker.log").read_text().split("\n") == [
        "before", "after", "5 lines of this log could not be written", "",
    ]  # fmt: skip
    assert capsys.readouterr().err == ""
