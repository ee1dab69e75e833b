"""`%gpu cost`: how much this kernel and its user have used, and what it costs, as HTML and as plain text.

Without prices, it shows GPU hours. One GPU hour is a whole GPU for one hour, or half a GPU for two hours.
"""

from collections.abc import Callable, Sequence
from html import escape

from fractional_gpu.core.metering.usage import HOUR_MS, SHARE_HOUR, Usage
from fractional_gpu.protocol.accounts import Cost, UsageEntry
from fractional_gpu_kernel.display.lines import View
from fractional_gpu_kernel.display.views import box, table

_PERIODS = ("this kernel", "today", "this month")
_MJ_PER_WH = 3_600_000


class CostView(View):
    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._periods = (cost.lease, cost.today, cost.month)
        entries = [entry for entries in self._periods for entry in entries]
        self._priced = bool(cost.currency) or any(entry.currency for entry in entries)
        self._drawn = any(entry.usage.energy_mj for entry in entries)

    def rows(self) -> list[tuple[str, ...]]:
        columns = [self._figures(entries) for entries in self._periods]
        return [(name, *(figures[name] for figures in columns)) for name in columns[0]]

    def _figures(self, entries: Sequence[UsageEntry]) -> dict[str, str]:
        used = [entry.usage for entry in entries]
        charged, busy, suspended = (
            _decimals(sum(getattr(one, share) for one in used), SHARE_HOUR)
            for share in ("charged_share", "busy_share", "suspended_share")
        )
        if self._priced:
            figures = {
                "cost": self._amounts(lambda one: one.charge_milli, entries),
                "as whole GPUs": self._amounts(lambda one: one.whole_milli, entries),
                "saved by suspending": self._amounts(lambda one: one.resident_milli - one.charge_milli, entries),
                "GPU hours charged": charged,
                "GPU hours busy": busy,
            }
        else:
            hours_open = _decimals(sum(one.reserved_ms for one in used), HOUR_MS)
            figures = {
                "GPU hours": charged,
                "GPU hours busy": busy,
                "GPU hours suspended": suspended,
                "hours open": hours_open,
            }
        if self._drawn:
            watt_hours = sum(one.energy_mj for one in used) / _MJ_PER_WH
            figures["energy"] = f"{watt_hours:.1f} Wh" if watt_hours < 1000 else f"{watt_hours / 1000:,.2f} kWh"
            if self._cost.carbon:
                grams = sum(entry.carbon_mg for entry in entries) / 1000
                figures["CO2"] = f"{grams:.1f} g" if grams < 1000 else f"{grams / 1000:,.2f} kg"
        return figures

    def sentences(self) -> list[str]:
        cost = self._cost
        said = ["Today and this month: all your kernels, in the machine's local time."]
        if self._priced:
            said.append("As whole GPUs: the cost if each kernel had had a whole GPU.")
        else:
            said.append(
                "Hours open: the GPU hours if each kernel had had a whole GPU. Others could use the suspended GPU hours."
            )
        if cost.currency:
            now = f"costs {_amount(cost.now_milli)} {cost.currency} per hour" if cost.now_milli else "costs nothing"
            said.append(f"This kernel currently {now}.")
        said.append(cost.terms)
        said += [budget.sentence for budget in cost.budgets]
        if self._drawn and cost.carbon:
            said.append(f"{cost.carbon}.")
        if cost.simulated:
            said.append("The GPU is simulated: no real one was used.")
        return [sentence for sentence in (*said, cost.note) if sentence]

    def __repr__(self) -> str:
        rows = [("", *_PERIODS), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_PERIODS) + 1)]
        lines = []
        for name, *cells in rows:
            aligned = [f"{text:>{width}}" for text, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([f"{name:<{widths[0]}}", *aligned]))
        return "\n".join([*lines, *self.sentences()])

    def html(self) -> str:
        rows = [[escape(cell) for cell in row] for row in self.rows()]
        simulated = " on a simulated GPU" if self._cost.simulated else ""
        title = f"What this kernel {'costs' if self._priced else 'uses'}{simulated}"
        return box(title, table(rows, ("", *_PERIODS)), note=" ".join(self.sentences()))

    def _amounts(self, figure: Callable[[Usage], int], entries: Sequence[UsageEntry]) -> str:
        sums = {entry.currency: figure(entry.usage) for entry in entries if entry.currency}
        sums = sums or {self._cost.currency: 0}
        return " + ".join(f"{_amount(milli)} {currency}".rstrip() for currency, milli in sorted(sums.items()))


def _decimals(value: int, unit: int) -> str:
    return _amount((2 * value * 1000 + unit) // (2 * unit))


def _amount(milli: int) -> str:
    """Format a number of thousandths exactly, as in `1,234.500`."""
    return f"{milli // 1000:,}.{milli % 1000:03}"
