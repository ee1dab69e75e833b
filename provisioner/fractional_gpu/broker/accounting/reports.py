"""Computes usage totals for the peers allowed to see them.

- Users see their own figures. If `usage_visible` allows it, they also see a total for each user in their group or on the whole host, but
  never the names of other users' notebooks. Administrators see everything.
- A hub user and a local user with the same name are different people, so their figures are kept separate.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fractional_gpu.broker.accounting.metering import Metering
from fractional_gpu.broker.lanes import QUESTIONS
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.config import carbon
from fractional_gpu.config.carbon import Carbon
from fractional_gpu.protocol.accounts import UsageEntry
from fractional_gpu.reports.sums import TIMES, columns_for, summed

_FRESH_S: Final = 5.0  # the maximum age of the figures that a reader gets
_HIDDEN: Final = "You may not see these figures: c.GPUBroker.usage_visible determines whose figures users may see."
_PRIVATE: Final = frozenset({"notebook", "lease"})


@dataclass(frozen=True, slots=True)
class Reader:
    """The caller: an administrator or a user.

    `seated` is true for a hub user. `group` is the group through which the user is granted GPUs, or "".
    """

    administrator: bool = False
    owner: str = ""
    seated: bool = False
    group: str = ""


@dataclass(frozen=True, slots=True)
class ReportQuery:
    """A query for usage totals.

    `by` lists the columns to group by. `since_s` and `until_s` limit the hours, in seconds since 1970. `only` restricts the query to
    particular users, groups, pools and so on.
    """

    by: tuple[str, ...]
    since_s: int
    until_s: int
    only: Mapping[str, str | int]


class UsageReports:
    def __init__(
        self, metering: Metering, writer: LedgerWriter, *, visible: str, carbon_setting: float | Path | None
    ) -> None:
        self._metering = metering
        self._writer = writer
        self.visible = visible
        self._carbon = carbon_setting
        self._fresh_s = -_FRESH_S

    def scope(self, reader: Reader, by: Sequence[str]) -> str:
        if reader.administrator:
            return "all"
        if _PRIVATE & set(by) or (self.visible == "group" and not reader.group):
            return "own"
        return self.visible

    async def answer(self, reader: Reader, question: ReportQuery) -> tuple[list[UsageEntry], Carbon | None, str]:
        """Write the latest figures to the ledger, then return the totals, the carbon intensity, and a note about missing figures.

        Raises LedgerError. Cancellation does not stop the write.
        """
        await self._refresh()
        own = self._own(reader, self.scope(reader, question.by))
        if any(question.only.get(name, value) != value for name, value in own.items()):
            return [], None, _HIDDEN
        only = dict(question.only) | own
        found, note = None, ""
        if self._carbon is not None:
            try:
                found = await QUESTIONS.run(carbon.read, self._carbon)
            except ValueError as error:
                note = f"The carbon figures are missing: {error}"
        times = [one for one in question.by if one in TIMES]
        by_hour = bool(times) or (found is not None and found.changes)
        columns = [*columns_for(question.by), "currency", *(["hour"] if by_hour else [])]

        def read() -> list[UsageEntry]:
            rows = self._writer.ledger.metered(columns, question.since_s, question.until_s, only)
            return summed(rows, question.by, found.mg if found is not None else None)

        # A busy host's year has hundreds of thousands of rows. They are summed while they are read, but not on the loop, which kernels wait
        # for, nor in the thread that writes grants.
        return await self._writer.read_aside(read), found, note

    async def _refresh(self) -> None:
        """Write new figures to the ledger, but at most once every `_FRESH_S` seconds, so that readers cannot keep the disk busy."""
        if time.monotonic() - self._fresh_s >= _FRESH_S:
            self._fresh_s = time.monotonic()
            self._metering.write()

    @staticmethod
    def _own(reader: Reader, scope: str) -> dict[str, str | int]:
        if scope == "own":
            return {"user": reader.owner, "seated": int(reader.seated)}
        return {"group": reader.group} if scope == "group" else {}
