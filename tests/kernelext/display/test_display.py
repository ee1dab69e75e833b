"""What a user sees, as text and as HTML."""

from types import SimpleNamespace
from typing import Any

import pytest

from fractional_gpu_kernel.display.lines import LiveLine, Sentence


class Shell:
    def __init__(self) -> None:
        self.published: list[tuple[str, bool, str]] = []
        self.display_pub = SimpleNamespace(publish=self.publish, clear_output=self.clear_output)

    def publish(
        self, data: dict[str, str], metadata: dict[str, Any], transient: dict[str, str], *, update: bool
    ) -> None:
        assert metadata == {}
        self.published.append((data["text/plain"], update, transient["display_id"]))

    def clear_output(self, *, wait: bool) -> None:
        self.published.append(("cleared", wait, ""))


def test_what_others_wrote_is_escaped() -> None:
    assert "<script>" not in Sentence("<script>alert()</script>").bundle()["text/html"]


def test_a_simulated_gpu_says_so_in_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SIMULATED_DIR", "somewhere")
    bundle = Sentence("waits").bundle()
    assert bundle["text/plain"] == "[simulated gpu] waits"
    assert "simulated GPU" in bundle["text/html"]


def test_a_line_is_shown_once_changed_in_place_and_removed() -> None:
    shell = Shell()
    line = LiveLine(shell)
    line.remove()
    assert shell.published == []
    for text in ("one", "one", "two"):
        line.show(text)
    line.remove()
    line.remove()
    identity = shell.published[0][2]
    assert shell.published == [("[gpu] one", False, identity), ("[gpu] two", True, identity), ("cleared", False, "")]


def test_two_lines_do_not_share_a_place() -> None:
    shell = Shell()
    LiveLine(shell).show("one")
    LiveLine(shell).show("two")
    assert shell.published[0][2] != shell.published[1][2]
