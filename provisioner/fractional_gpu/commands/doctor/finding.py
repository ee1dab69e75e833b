"""What `jupyter gpu doctor` found: one line a check, as text and as JSON. Pure.

Rules: a check that has nothing to complain of still says what it saw. A finding above `note` says what to do. The names of checks
are stable: scripts filter by them.
"""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

__all__ = ["Finding", "Severity", "as_json", "exit_code", "note", "ok", "problem", "render", "warning"]

WIDTH = 118
_CHECK_CELLS = 14
_SEVERITY_CELLS = 7


class Severity(StrEnum):
    """How much a finding matters, least first."""

    OK = "ok"
    NOTE = "note"  # an ordinary circumstance that a reader should know
    WARNING = "warning"  # it works, and something will be missed
    ERROR = "error"  # something that this project promises cannot work


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: the check, how much it matters, what was found, and what to do about it."""

    check: str
    severity: Severity
    finding: str
    advice: str = ""


def ok(check: str, finding: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(check=check, severity=Severity.OK, finding=finding)


def note(check: str, finding: str, advice: str = "") -> Finding:
    """Return an ordinary circumstance."""
    return Finding(check=check, severity=Severity.NOTE, finding=finding, advice=advice)


def warning(check: str, finding: str, advice: str) -> Finding:
    """Return what will be missed, and what to do about it."""
    return Finding(check=check, severity=Severity.WARNING, finding=finding, advice=advice)


def problem(check: str, finding: str, advice: str) -> Finding:
    """Return what cannot work, and what to do about it."""
    return Finding(check=check, severity=Severity.ERROR, finding=finding, advice=advice)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if anything cannot work, else 0."""
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """Return one JSON object and a newline. `worst` is the highest severity found."""
    order = list(Severity)
    worst = max((finding.severity for finding in findings), key=order.index, default=Severity.OK)
    content = {"ok": not exit_code(findings), "worst": worst, "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, ensure_ascii=False) + "\n"


def render(findings: Sequence[Finding]) -> str:
    """Return the findings as text, a conclusion last, ending in a newline."""
    lines = [line for finding in findings for line in _lines(finding)]
    counts = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
    if counts[Severity.ERROR]:
        conclusion = f"{_count(counts[Severity.ERROR], 'error')}, {_count(counts[Severity.WARNING], 'warning')}."
    elif counts[Severity.WARNING]:
        conclusion = f"No errors, {_count(counts[Severity.WARNING], 'warning')}."
    else:
        conclusion = "Nothing to complain of."
    return "\n".join([*lines, "", conclusion]) + "\n"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _lines(finding: Finding) -> list[str]:
    head = f"{finding.severity:<{_SEVERITY_CELLS}}  {finding.check:<{_CHECK_CELLS}}  "
    indent = " " * len(head)
    lines = textwrap.wrap(finding.finding, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    if finding.advice:
        lines += textwrap.wrap(
            finding.advice,
            WIDTH,
            initial_indent=f"{indent}-> ",
            subsequent_indent=f"{indent}   ",
            break_on_hyphens=False,
        )
    return lines
