"""Reads a site's Slurm configuration (slurm.conf with its includes, gres.conf and cgroup.conf), and shows changes to it as a diff.

If a key occurs twice, Slurm silently uses the last line, so an existing key is edited in place and never added again. This module writes no
files: `patch` applies the diff, and `patch -R` restores the original bytes.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

_COMMENT = re.compile(r"#[^\n]*")
_RECORD = re.compile(r"\s*(?:(?:Node|Partition|Frontend)Name|NodeSet|DownNodes)\s*=", re.IGNORECASE)
_INCLUDE = re.compile(r"\s*include\s+(\S+)", re.IGNORECASE)
_MARK = "# for shares of GPUs (jupyter-fractional-gpu)\n"


@dataclass(frozen=True, slots=True)
class Setting:
    r"""A line of a file, with its continuation lines (after `\\`). `begin` is its offset. In `text`, comments are replaced by blanks."""

    file: Path
    begin: int
    text: str

    def find(self, key: str) -> re.Match[str] | None:
        return re.search(rf"(?:^|\s){key}\s*=\s*([^\s\\]+)", self.text, re.IGNORECASE)

    def value(self, key: str) -> str:
        return match[1] if (match := self.find(key)) else ""


class ConfigFile:
    """A file and the files it includes. A missing file is treated as empty. Raises OSError if a file is not readable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: list[Setting] = []
        self._texts: dict[Path, str] = {}
        self._edits: dict[Path, list[tuple[int, int, str]]] = {}
        self._added: list[str] = []
        self._read(path)

    def _read(self, path: Path) -> None:
        # Keep the line ends, because reverting the diff must restore the same bytes.
        text = path.read_bytes().decode(errors="surrogateescape") if path.exists() else ""
        self._texts[path], self._edits[path] = text, []
        begin = end = 0
        for line in _lines(text):
            end += len(line)
            if line.rstrip("\r\n").endswith("\\"):
                continue
            whole = _COMMENT.sub(lambda found: " " * len(found[0]), text[begin:end])
            if include := _INCLUDE.match(whole):
                self._read(self.path.parent / include[1])
            elif whole.strip():
                self.settings.append(Setting(path, begin, whole))
            begin = end

    def of_key(self, key: str) -> list[Setting]:
        """Return all lines with this key. The last line of a cluster-wide setting applies, and all lines of a record such as NodeName."""
        of_records = bool(_RECORD.match(f"{key}="))
        return [one for one in self.settings if one.value(key) and of_records == bool(_RECORD.match(one.text))]

    def value(self, key: str) -> str:
        return self.of_key(key)[-1].value(key) if self.of_key(key) else ""

    def set(self, key: str, value: str) -> None:
        if not (found := self.of_key(key)):
            self.add(f"{key}={value}")
        elif found[-1].value(key) != value:
            self.change(found[-1], key, value)

    def change(self, setting: Setting, key: str, value: str) -> None:
        if (match := setting.find(key)) is not None:
            begin, end = match.span(1)
        else:
            begin = end = len(setting.text.rstrip())
            value = f" {key}={value}"
        self._edits[setting.file].append((setting.begin + begin, setting.begin + end, value))

    def put_before(self, setting: Setting, text: str) -> None:
        self._edits[setting.file].append((setting.begin, setting.begin, text))

    def remove(self, setting: Setting) -> None:
        self._edits[setting.file].append((setting.begin, setting.begin + len(setting.text), ""))

    def add(self, line: str) -> None:
        self._added += [*([] if self._added else [_MARK]), f"{line}\n"]

    def changed(self, file: Path) -> str:
        text = self._texts[file]
        for begin, end, value in sorted(self._edits[file], reverse=True):
            text = text[:begin] + value + text[end:]
        if file == self.path and self._added:
            text += "\n" * (text[-1:] not in ("", "\n")) + "".join(self._added)
        return text

    def diff(self) -> str:
        return "".join(_diff(file, text, self.changed(file)) for file, text in self._texts.items())


def _diff(file: Path, old: str, new: str) -> str:
    name = str(file).lstrip("/")
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{name}" if old else "/dev/null", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def extended(value: str, *words: str) -> str:
    there = [word for word in value.split(",") if word and word.lower() not in ("(null)", "none", "task/none")]
    return ",".join([*there, *(word for word in words if word.lower() not in [one.lower() for one in there])])
