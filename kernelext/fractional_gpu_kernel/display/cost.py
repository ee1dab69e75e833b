"""`%gpu cost`: what this kernel and its user used, and what it costs, as HTML and as plain text. Imported for the first `%gpu cost`.

Where no price is set, GPU hours take the place of amounts: one is a whole GPU for an hour, or a half for two.
"""

from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from fractional_gpu.core.metering.usage import HOUR_MS, SHARE_HOUR, Usage
from fractional_gpu.protocol.accounts import Cost, UsageEntry
from fractional_gpu_kernel.display.lines import View
from fractional_gpu_kernel.display.views import box, table

_PERIODS = ("this kernel", "today", "this month")
_MJ_PER_WH = 3_600_000
_MG_PER_G = 1000
_KILO = 1000


class CostView(View):
    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._periods = (cost.lease, cost.today, cost.month)
        entries = [entry for entries in self._periods for entry in entries]
        self._priced = bool(cost.currency) or any(entry.currency for entry in entries)
        self._drawn = any(entry.usage.energy_mj for entry in entries)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows: a name, and a figure for each period."""
        rows: list[tuple[str, Callable[[Sequence[UsageEntry]], str]]] = []
        if self._priced:
            money = {
                "cost": lambda one: one.charge_milli,
                "as whole GPUs": lambda one: one.whole_milli,
                "saved by suspending": lambda one: one.resident_milli - one.charge_milli,
            }
            rows = [(name, partial(self._amounts, figure)) for name, figure in money.items()]
        charged = "GPU hours charged" if self._priced else "GPU hours"
        rows.append((charged, lambda entries: _hours(entries, lambda one: one.charged_share)))
        rows.append(("GPU hours busy", lambda entries: _hours(entries, lambda one: one.busy_share)))
        if not self._priced:
            rows.append(("GPU hours suspended", lambda entries: _hours(entries, lambda one: one.suspended_share)))
            rows.append(("hours open", lambda entries: _decimals(_sum(entries, lambda one: one.reserved_ms), HOUR_MS)))
        if self._drawn:
            rows.append(("energy", lambda entries: _energy(_sum(entries, lambda one: one.energy_mj))))
            if self._cost.carbon:
                rows.append(("CO2", lambda entries: _carbon(sum(one.carbon_mg for one in entries))))
        return [(name, *(figure(entries) for entries in self._periods)) for name, figure in rows]

    def sentences(self) -> list[str]:
        cost = self._cost
        said = ["Today and this month: all your kernels, by the machine's local time."]
        if self._priced:
            said.append("As whole GPUs: what a whole GPU for each kernel would have cost.")
        else:
            said.append(
                "Hours open: what a whole GPU for each kernel would have taken. GPU hours suspended were free for others."
            )
        if cost.currency:
            now = f"costs {_amount(cost.now_milli)} {cost.currency} per hour" if cost.now_milli else "costs nothing"
            said.append(f"As it is now, this kernel {now}.")
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
        """Return the amount in each currency; what was used without a price has none."""
        sums = {entry.currency: figure(entry.usage) for entry in entries if entry.currency}
        sums = sums or {self._cost.currency: 0}
        return " + ".join(f"{_amount(milli)} {currency}".rstrip() for currency, milli in sorted(sums.items()))


def _sum(entries: Sequence[UsageEntry], figure: Callable[[Usage], int]) -> int:
    return sum(figure(entry.usage) for entry in entries)


def _hours(entries: Sequence[UsageEntry], figure: Callable[[Usage], int]) -> str:
    return _decimals(_sum(entries, figure), SHARE_HOUR)


def _decimals(value: int, unit: int) -> str:
    """Return how many units a value is, with three decimals, rounded half up."""
    return _amount((2 * value * 1000 + unit) // (2 * unit))


def _amount(milli: int) -> str:
    """Return thousandths exactly: `1,234.500`."""
    return f"{milli // 1000:,}.{milli % 1000:03}"


def _energy(mj: int) -> str:
    watt_hours = mj / _MJ_PER_WH
    return f"{watt_hours:.1f} Wh" if watt_hours < _KILO else f"{watt_hours / _KILO:,.2f} kWh"


def _carbon(mg: int) -> str:
    grams = mg / _MG_PER_G
    return f"{grams:.1f} g" if grams < _KILO else f"{grams / _KILO:,.2f} kg"
