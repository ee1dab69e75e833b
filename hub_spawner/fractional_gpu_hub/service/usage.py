"""Gets the figures for the "My usage" and "Usage" pages from the broker, and prepares the contents of each page.

The broker treats this process as an administrator and lets it read everything, so this module enforces the rules:

- A user's figures are requested by name, and only for users of the hub (`seated`), because the machine may have another user with the same
  name. Entries for other names are dropped, even if the broker returns them.
- The broker's `usage_visible` setting determines what users see about others: nothing, or totals per user, either for the viewer's groups
  or for everyone. They never see the names of other users' notebooks. If the setting's value is unknown, they see nothing about others.
- Users see advice about their own notebooks, and budgets for themselves and their groups. Administrators see everything.
"""

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.accounts import BudgetStatus, UsageReport
from fractional_gpu.protocol.errors import BadRequestError
from fractional_gpu.reports.chargeback import as_csv
from fractional_gpu.reports.columns import budget_names
from fractional_gpu.reports.page import body, period_text
from fractional_gpu.reports.periods import period
from fractional_gpu_hub.service.views import Viewer

DATES: Final = "dates"
PERIODS: Final[Mapping[str, str]] = {
    word: word.replace("-", " ") for word in ("today", "yesterday", "this-week", "this-month", "last-month")
}
BY: Final[Mapping[str, str]] = {
    "group": "group",
    "group,user": "group and user",
    "user": "user",
    "user,pool": "user and pool",
    "pool": "pool",
    "device": "GPU",
}
PRIVACY: Final[Mapping[str, str]] = {
    "own": "Only you and the GPU administrators can see these figures.",
    "group": "Members of your groups can see your totals, but not your notebooks; administrators can see all of this.",
    "all": "All users can see your totals, but not your notebooks; administrators can see all of this.",
}
_THIS_MONTH: Final = "this-month"
_OVER: Final = frozenset({"yesterday", "last-month"})
_PARTY: Final = ("day", "user", "group", "pool")
_MOST_DAYS: Final = {True: 93, False: 400}  # for all users (True), and for one user
_MOST_GROUPS: Final = 20
_MOST_BUDGETS: Final = 200
_DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """What a page asks for: the period, both in seconds since 1970 and as typed, and how to group the figures for all users."""

    since_s: int
    until_s: int
    word: str = _THIS_MONTH
    since: str = ""
    until: str = ""
    by: str = "group"

    @property
    def query(self) -> dict[str, str]:
        dates = {"since": self.since, "until": self.until} if self.word == DATES else {}
        return {"period": self.word, "by": self.by, **dates}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePage:
    """A page's contents. `others` maps headings to the figures of other users that the viewer may see."""

    report: UsageReport
    by: tuple[str, ...]
    others: Mapping[str, UsageReport] = field(default_factory=dict)
    note: str = ""
    budgets: tuple[BudgetStatus, ...] = ()


def chosen(arguments: Mapping[str, str], *, everybody: bool, now_s: int | None = None) -> PageQuery:
    word, by = arguments.get("period") or _THIS_MONTH, arguments.get("by") or "group"
    for name, given, allowed in (("period", word, (*PERIODS, DATES)), ("by", by, BY)):
        if given not in allowed:
            raise BadRequestError(
                f"{name} {given[:40]!r} is unknown; choose one of: {'; '.join(allowed)}", reason="bad-period"
            )
    since, until = (arguments.get("since", ""), arguments.get("until", "")) if word == DATES else (word, "")
    if not since:
        raise BadRequestError("the first day is missing; choose one, such as 2026-11-01", reason="bad-period")
    end = word if word in _OVER else until or None
    try:
        since_s, until_s = period(since, end, int(time.time()) if now_s is None else now_s)
    except ValueError as error:
        raise BadRequestError(
            str(error).replace("--since", "from").replace("--until", "to"), reason="bad-period"
        ) from None
    if until_s - since_s > (_MOST_DAYS[everybody] + 1) * _DAY_S:
        raise BadRequestError(
            f"the page shows at most {_MOST_DAYS[everybody]} days; choose a shorter period, or use `jupyter gpu report`",
            reason="bad-period",
        )
    return PageQuery(since_s=since_s, until_s=until_s, word=word, since=since, until=until, by=by)


def own_figures(client: SeatClient, viewer: Viewer, asked: PageQuery) -> UsagePage:
    """Return the viewer's figures for each notebook, and any of other users' figures that the viewer may see. Raises FractionalGPUError."""
    columns = (*_PARTY, "notebook")
    report = client.usage(columns, asked.since_s, asked.until_s, {"user": viewer.name, "seated": "1"})
    own = [entry for entry in report.entries if entry.of["user"] == viewer.name]
    found: dict[str, UsageReport] = {}
    groups = sorted({one for one in viewer.groups if one}) if report.visible == "group" else []
    for group in groups[:_MOST_GROUPS]:
        answer = client.usage(_PARTY, asked.since_s, asked.until_s, {"group": group})
        entries = [entry for entry in answer.entries if entry.of["group"] == group]
        found[f"Group {group}"] = replace(answer, entries=entries, scope="group")
    if report.visible == "all":
        found["All users"] = client.usage(_PARTY, asked.since_s, asked.until_s)
    note = f"Only {_MOST_GROUPS} of your {len(groups)} groups are shown." if len(groups) > _MOST_GROUPS else ""
    budgets = [one for one in _budgets(client) if _is_own(one, viewer)]
    # Leave out advice for a user of the machine with the same name.
    advice = [one for one in report.advice if one.owner == viewer.name and one.seated]
    own_report = replace(report, entries=own, scope="own", advice=advice)
    return UsagePage(report=own_report, by=("notebook",), others=found, note=note, budgets=tuple(budgets))


def _is_own(budget: BudgetStatus, viewer: Viewer) -> bool:
    if budget.kind == "group":
        return budget.name in viewer.groups
    return budget.name == viewer.name and budget.account != "machine"


def _budgets(client: SeatClient) -> list[BudgetStatus]:
    return sorted(
        client.budgets().budgets,
        key=lambda one: (-one.spent * 1000 // max(1, one.amount), one.kind, one.name, one.text),
    )


def all_figures(client: SeatClient, asked: PageQuery) -> UsagePage:
    by = tuple(asked.by.split(","))
    columns = tuple(dict.fromkeys((*_PARTY, *by)))
    report = client.usage(columns, asked.since_s, asked.until_s, advice=True)
    return UsagePage(report=report, by=by, budgets=tuple(_budgets(client)[:_MOST_BUDGETS]))


def shown(figures: UsagePage) -> dict[str, Any]:
    report, own = figures.report, figures.report.scope == "own"
    names = budget_names(figures.budgets)
    return {
        "time": period_text(report),
        "privacy": PRIVACY.get(report.visible, PRIVACY["own"]) if own else "",
        "note": figures.note,
        "simulated": report.simulated,
        "budgets": [
            {"text": one.sentence if own else _budget_text(one, names(one)), "warned": one.warned}
            for one in figures.budgets
        ],
        "parts": body(report, figures.by, whole=report.scope == "all", others=figures.others),
    }


def _budget_text(budget: BudgetStatus, whose: str) -> str:
    left = "used up" if budget.used_up else f"{budget.left_text} left"
    return f"{whose[:1].upper()}{whose[1:]}: {budget.text}: {budget.spent_text} spent, {left}"


def csv_of(figures: UsagePage) -> bytes:
    return as_csv(figures.report, figures.by, provider=platform.node() or "GPU host").encode()
