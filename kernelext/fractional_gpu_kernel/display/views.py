"""Displays for `%gpu`: this kernel, the machine, and the history of a lease. HTML and plain text have the same content."""

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape

from fractional_gpu.core.model import HOLDING
from fractional_gpu.core.units import format_duration, format_forecast, format_fraction, format_memory, format_rough
from fractional_gpu.protocol.names import device_deadline, host_deadline, lease_deadline, state_meaning, state_words
from fractional_gpu.protocol.status import Cap, DeviceStatus, HostStatus, LeaseStatus, Neighbour, Story
from fractional_gpu_kernel.display.lines import View

# Colours are JupyterLab's CSS variables for light and dark themes, with fallbacks for other programs. The text also says what the colours
# show. Every text passes through `escape`, because it may come from another user.

USED = "var(--jp-brand-color1,#2196f3)"
SAVED = "var(--jp-warn-color1,#f57c00)"
OTHERS = "var(--jp-ui-font-color3,#9e9e9e)"
FREE = "var(--jp-border-color2,rgba(127,127,127,.35))"

_TEXT = "color:var(--jp-content-font-color1,inherit)"
_MUTED = "opacity:.75"
_CELL = "text-align:left;padding:2px 12px 2px 0;border:none;background:none;vertical-align:top;white-space:normal"


def box(title: str, *parts: str, note: str = "") -> str:
    """Return a block with a title. `title` and `note` are plain text, and `parts` are HTML."""
    heading = f'<div style="font-weight:600;margin-bottom:4px">{escape(title)}</div>'
    below = f'<div style="{_MUTED};font-size:90%;margin-top:4px">{escape(note)}</div>' if note else ""
    return f'<div style="{_TEXT};margin:2px 0">{heading}{"".join(parts)}{below}</div>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return an HTML table. `rows` contain HTML, and `head` plain-text column titles. Without `head`, each row begins with its header."""
    lines = []
    if head:
        style = f"{_CELL};font-weight:400;{_MUTED}"
        names = "".join(f'<th scope="col" style="{style}">{escape(name)}</th>' for name in head)
        lines.append(f"<tr>{names}</tr>")
    named = f'<th scope="row" style="{_CELL};font-weight:400;white-space:nowrap;{_MUTED}">{{}}</th>'
    for first, *others in rows:
        cells = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in ((first, *others) if head else others))
        lines.append(f'<tr style="background:none">{"" if head else named.format(first)}{cells}</tr>')
    return f'<table style="margin:0;border:none;border-collapse:collapse">{"".join(lines)}</table>'


def bar(parts: Iterable[tuple[int, str]], whole: int, label: str) -> str:
    """Return a horizontal bar. `parts` are (size, colour) pairs, and `label` is for screen readers."""
    pieces = []
    left = 100.0
    for size, colour in parts:
        width = min(left, 100.0 * max(0, size) / max(1, whole))
        left -= width
        pieces.append(f'<span style="display:inline-block;height:100%;width:{width:.1f}%;background:{colour}"></span>')
    return (
        f'<span role="img" aria-label="{escape(label)}" title="{escape(label)}" style="display:inline-block;width:180px;height:.7em;'
        f'border-radius:3px;overflow:hidden;line-height:0;background:{FREE};vertical-align:baseline">{"".join(pieces)}</span>'
    )


def text_bar(parts: Iterable[tuple[int, str]], whole: int, width: int = 20) -> str:
    """Return a bar as text. `parts` are (size, character) pairs. Parts larger than 0 get at least one character if there is space left."""
    signs = ""
    total = 0
    for size, sign in parts:
        total += max(0, size)
        upto = min(width, max(round(width * total / max(1, whole)), len(signs) + (size > 0)))
        signs += sign * (upto - len(signs))
    return f"[{signs:-<{width}}]"


def moment(at_ms: int, now_ms: int) -> str:
    at, now = (datetime.fromtimestamp(ms / 1000).astimezone() for ms in (at_ms, now_ms))
    return f"{at:%H:%M:%S}" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S}"


_KEPT_BY = {
    Cap.DRIVER: "the driver enforces it for all of this kernel's processes",
    Cap.FRAMEWORK: "torch, JAX and CuPy respect it; other memory use is checked afterwards",
    Cap.SAMPLE: "not enforced; memory use is checked afterwards",
}


class StatusView(View):
    def __init__(self, status: LeaseStatus) -> None:
        self._status = status

    def rows(self) -> list[tuple[str, str]]:
        status = self._status
        each = f" on each of {len(status.lease.device_ids)} devices" if len(status.lease.device_ids) > 1 else ""
        share = f"{format_fraction(status.spec.fraction_milli)} GPU, {format_memory(status.spec.reserve_mib)} of device memory{each}"
        rows = [
            ("share", f"{share}, pool {status.spec.pool}"),
            ("state", f"{state_meaning(status.state)} (for {format_duration(status.age_ms)})"),
            ("device", (status.device_name or "none yet") + (" (simulated)" if status.simulated else "")),
            ("memory", f"{format_memory(status.lease.used_mib)} of {format_memory(status.spec.reserve_mib)} used"),
        ]
        rows.append(("cap", _KEPT_BY[status.cap]))
        if status.note:
            rows.append(("note", status.note))
        if deadline := lease_deadline(status):
            rows.append(("deadline", deadline))
        if status.lease.unsuspendable_reason:
            rows.append(("stays", f"it will not be suspended: {status.lease.unsuspendable_reason}"))
        if status.lease.saved_mib:
            rows.append(("saved", f"{format_memory(status.lease.saved_mib)} held in host memory"))
        if (resume := status.lease.resume) is not None:
            takes = format_forecast(resume.expected_ms, resume.low_ms, resume.high_ms)
            rows.append(("resume", f"takes {takes} once there is room"))
        if status.position is not None:
            rows.append(("queue", f"place {status.position}" + _expected(status)))
        if status.pinned_ms:
            rows.append(("pinned", f"for {format_rough(status.pinned_ms)} more; %gpu unpin ends it"))
        if status.suspends or status.resumes:
            times = ["once" if count == 1 else f"{count} times" for count in (status.suspends, status.resumes)]
            rows.append(("so far", f"suspended {times[0]}, resumed {times[1]}"))
        if status.neighbours:
            rows.append(("neighbours", "; ".join(_neighbour(each) for each in status.neighbours)))
        if status.slowdown.sentence:
            rows.append(("slowed", status.slowdown.sentence))
        if status.advice is not None and status.advice.sentence:
            rows.append(("advice", f"{status.advice.sentence}."))
        if status.sentence:
            rows.append(("last", status.sentence))
        return rows

    def __repr__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        status = self._status
        picture = text_bar([(status.lease.used_mib, "#")], status.spec.reserve_mib)
        return "\n".join(f"{name:<{width}}  {f'{picture} ' if name == 'memory' else ''}{text}" for name, text in rows)

    def html(self) -> str:
        status = self._status
        cells = []
        for name, text in self.rows():
            shown = escape(text)
            if name == "memory":
                shown = f"{bar([(status.lease.used_mib, USED)], status.spec.reserve_mib, text)} {shown}"
            cells.append((escape(name), shown))
        simulated = " on a simulated GPU" if status.simulated else ""
        title = f"{format_fraction(status.spec.fraction_milli)} GPU{simulated}: {state_words(status.state)}"
        return box(title, table(cells))


class TopView(View):
    """The machine's devices and leases. The user's own leases are listed individually, and everyone else's are added up."""

    def __init__(self, host: HostStatus, own: str = "") -> None:
        self._host = host
        self._own = own

    def tenants(self, device: DeviceStatus) -> list[tuple[str, str, str]]:  # share, who, what
        here = [lease for lease in self._host.leases if lease.state in HOLDING]
        mine = [lease for lease in here if device.device_id in lease.lease.device_ids]
        rows = []
        for lease in mine:
            share = f"{format_fraction(lease.spec.fraction_milli)} GPU, {format_memory(lease.lease.reserved_mib)}"
            rows.append((share, self._name(lease), self._doing(lease)))
        others_mib = device.reserved_mib - sum(lease.lease.reserved_mib for lease in mine)
        if others_mib > 0:
            rows.append((format_memory(others_mib), "others", "reserved for kernels of other users"))
        if device.stranger_mib > 0:
            known = [(one.name, one.used_mib) for one in device.strangers if one.used_mib]
            known = known or [("other programs", device.stranger_mib)]
            rows += [(format_memory(mib), who, "used without a share") for who, mib in known]
        return rows

    def elsewhere(self) -> list[tuple[str, str, str]]:
        return [
            (f"{format_fraction(lease.spec.fraction_milli)} GPU", self._name(lease), self._doing(lease))
            for lease in self._host.leases
            if lease.state not in HOLDING
        ]

    def __repr__(self) -> str:
        lines = []
        for device in self._host.devices:
            beyond_mib = device.reserved_mib - device.used_mib
            picture = text_bar([(device.used_mib, "#"), (beyond_mib, "+")], device.memory_mib)
            lines.append(f"{self._heading(device)}\n  {picture} {_sums(device)}")
            lines += _columns(self.tenants(device))
        if rest := self.elsewhere():
            lines += ["on no GPU", *_columns(rest)]
        return "\n".join([*lines, *self._deadline(), _LEGEND if self._host.devices else _NO_DEVICES])

    def html(self) -> str:
        parts = []
        for device in self._host.devices:
            beyond_mib = device.reserved_mib - device.used_mib
            picture = bar([(device.used_mib, USED), (beyond_mib, OTHERS)], device.memory_mib, _sums(device))
            inner = _tenants_table(rows) if (rows := self.tenants(device)) else ""
            head = f'<div style="margin-top:6px"><b>{escape(self._heading(device))}</b> {picture} {escape(_sums(device))}</div>'
            parts.append(head + inner)
        if rest := self.elsewhere():
            parts.append(f'<div style="margin-top:6px"><b>On no GPU</b></div>{_tenants_table(rest)}')
        parts += [f'<div style="margin-top:6px">{escape(sentence)}</div>' for sentence in self._deadline()]
        note = _LEGEND_HTML if self._host.devices else _NO_DEVICES
        return box("GPUs of this machine", *parts, note=note)

    def _deadline(self) -> list[str]:
        left_ms = self._host.goes_away_in_ms
        return [] if left_ms is None else [f"This machine is being revoked: {host_deadline(left_ms)}."]

    def _heading(self, device: DeviceStatus) -> str:
        marks = ["simulated"] if self._host.simulated else []
        marks += [device_deadline(device) or "draining"] if device.draining else []
        marks += ["lost"] if device.lost else []
        marks += ["over-committed"] if device.over_committed else []
        marked = f" ({', '.join(marks)})" if marks else ""
        pool = f", pool {device.pool}" if device.pool else ""
        return f"GPU {device.index}: {device.name}{marked}{pool}"

    def _doing(self, lease: LeaseStatus) -> str:
        words = [state_words(lease.state)]
        if lease.working:
            words.append("working in the background")
        elif lease.busy and lease.lease_id != self._own:  # this kernel is only busy with this command
            words.append("running a cell")
        if lease.position is not None:
            words.append(f"waiting at place {lease.position} in the queue" + _expected(lease))
        if lease.pinned_ms:
            words.append(f"pinned for {format_rough(lease.pinned_ms)}")
        if lease.goes_away_in_ms is not None:
            saved = "cannot be saved" if lease.lease.lost_because else "saved"
            words.append(f"{saved} before its GPU goes away")
        return ", ".join(words)

    def _name(self, lease: LeaseStatus) -> str:
        return "this kernel" if lease.lease_id == self._own else lease.spec.label or f"your kernel {lease.lease_id[:8]}"


_LEGEND = "In the bars: used (#), reserved beyond that (+), free (-)."
_LEGEND_HTML = "In the bars, from the left: used, reserved beyond that, free."
_NO_DEVICES = "This machine's broker manages no GPUs."


class StoryView(View):
    def __init__(self, story: Story, lines: int, now_ms: int | None = None) -> None:
        self._slowdown = story.slowdown.sentence
        self._lines = story.lines[-lines:]
        self._omitted = story.omitted + len(story.lines) - len(self._lines)
        self._now_ms = int(time.time() * 1000) if now_ms is None else now_ms

    def rows(self) -> list[tuple[str, str]]:
        return [(moment(line.at_ms, self._now_ms), line.sentence) for line in self._lines]

    def __repr__(self) -> str:
        rows = self.rows()
        width = max((len(at) for at, _ in rows), default=0)
        return "\n".join([*(f"{at:>{width}}  {sentence}" for at, sentence in rows), *filter(None, [self._note()])])

    def html(self) -> str:
        rows = [(escape(at), escape(sentence)) for at, sentence in self.rows()]
        return box("What happened to this kernel's share", table(rows), note=self._note())

    def _note(self) -> str:
        if not self._lines and not self._slowdown:
            return "Nothing has happened to this kernel's share yet."
        omitted = f"{self._omitted} older lines left out; %gpu explain --lines N shows more." if self._omitted else ""
        slowed = f"Slowed down: {self._slowdown}." if self._slowdown else ""
        return " ".join(filter(None, [omitted, slowed]))


def _neighbour(neighbour: Neighbour) -> str:
    name = f" “{neighbour.label}” (yours)" if neighbour.label else ""
    doing = "running a cell" if neighbour.busy else state_words(neighbour.state)
    if not neighbour.busy and neighbour.state == "resident":
        doing = "idle"
    return f"{format_fraction(neighbour.fraction_milli)} GPU{name}, {format_memory(neighbour.reserved_mib)}, {doing}"


def _expected(status: LeaseStatus) -> str:
    left = status.expected
    return "" if left is None else f"; {format_forecast(left.expected_ms, left.low_ms, left.high_ms, more=True)}"


def _sums(device: DeviceStatus) -> str:
    sums = f"{format_memory(device.used_mib)} used, {format_memory(device.reserved_mib)} reserved of {format_memory(device.memory_mib)}"
    if not device.demand_milli:
        return sums
    slowed = ", so they slow each other down" if device.demand_milli > 1000 else ""
    return f"{sums}; busy kernels need {device.demand_milli // 10} % of its compute{slowed}"


def _tenants_table(rows: Iterable[Sequence[str]]) -> str:
    return table([[escape(cell) for cell in row] for row in rows], ("share", "who", "state"))


def _columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    widths = [max((len(row[index]) for row in rows), default=0) for index in range(2)]
    return [f"  {share:<{widths[0]}}  {who:<{widths[1]}}  {what}" for share, who, what in rows]
