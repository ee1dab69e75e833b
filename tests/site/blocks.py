"""Fenced blocks of README and docs: what language each has, and whether it is run or says why it is not.

A block in a language of `RUN` is run by test_snippets.py, unless a comment right before it gives the reason:

    <!-- not run: needs a GPU -->

`<!-- prints -->` before a block of text makes it what the block before it prints; `...` in it stands for anything, each number for any.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

__all__ = ["QUIET", "REASONS", "RUN", "Block", "blocks", "commands", "pages"]

RUN = ("bash", "python", "ipython", "json", "yaml", "toml", "ini")
QUIET = ("text", "mermaid")
"""Pictures and output: not for typing."""
REASONS = ("needs a GPU", "needs a cluster", "needs root", "needs the network", "takes ", "tests/")
_FENCE = re.compile(r"(?P<indent>[ >]*)(?P<fence>```+)(?P<language>\S*)")
_COMMENT = re.compile(r"<!-- (?:not run: (?P<reason>.+)|(?P<prints>prints)) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is where its fence stands, `reason` why it is not run, `prints` whether it is the output of the last one."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""
    prints: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        end = next((n for n in range(at + 1, len(lines)) if lines[n].strip(" >") == opening["fence"]), None)
        if end is None:
            raise ValueError(f"{name}:{at + 1}: the fence is not closed")
        comment = _COMMENT.fullmatch(lines[at - 1].strip()) if at else None
        indent = len(opening["indent"])
        yield Block(
            page=name,
            line=at + 1,
            language=opening["language"],
            text="".join(f"{line[indent:]}\n" for line in lines[at + 1 : end]),
            reason=(comment["reason"] or "") if comment else "",
            prints=bool(comment and comment["prints"]),
        )
        at = end + 1


def commands(text: str) -> list[str]:
    """Return the commands of a shell block, one a line, without prompts, comments and empty lines."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
