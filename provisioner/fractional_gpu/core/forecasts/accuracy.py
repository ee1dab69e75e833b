"""The accuracy of forecasts: the last few hundred of a kind, compared with what happened."""

from collections.abc import Iterable
from dataclasses import dataclass

from fractional_gpu.core.model import Span

__all__ = ["Accuracy", "ErrorView"]

_KEPT = 256
_LEAST_MS = 100  # errors are relative to what happened, or to this
_MOST_PERMILLE = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorView:
    """The error of one kind of forecast over the last 256 of them, thousandths."""

    what: str  # wait, suspend, resume or cell
    count: int  # forecasts that were compared, ever
    median_error_permille: int  # median of |expected - happened| / happened
    covered_permille: int  # lay between their bounds; 800 is what the bounds promise


class Accuracy:
    """Compares one kind of forecast with what happened."""

    __slots__ = ("count", "recent", "what")

    def __init__(self, what: str, *, count: int = 0, recent: Iterable[int] = ()) -> None:
        self.what, self.count = what, count
        self.recent = list(recent)[-_KEPT:]  # a ring: twice the error in thousandths, and 1 if between the bounds

    def compare(self, expected: Span, happened_ms: int) -> None:
        """Record a forecast and what happened."""
        off = abs(expected.expected_ms - happened_ms) * 1000 // max(_LEAST_MS, happened_ms)
        entry = 2 * min(off, _MOST_PERMILLE) + (expected.low_ms <= happened_ms <= expected.high_ms)
        if len(self.recent) < _KEPT:
            self.recent.append(entry)
        else:
            self.recent[self.count % _KEPT] = entry
        self.count += 1

    def view(self) -> ErrorView:
        """Return the figures."""
        errors = sorted(entry // 2 for entry in self.recent)
        inside = sum(entry % 2 for entry in self.recent)
        return ErrorView(
            what=self.what,
            count=self.count,
            median_error_permille=errors[len(errors) // 2] if errors else 0,
            covered_permille=inside * 1000 // len(errors) if errors else 0,
        )
