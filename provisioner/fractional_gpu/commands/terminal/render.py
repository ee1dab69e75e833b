"""The broker's status as text. Pure functions: messages in, lines out; no terminal, no clock."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from fractional_gpu.core.units import format_duration, format_forecast, format_fraction, format_memory
from fractional_gpu.protocol.messages import COMMAND, DeviceStatus, HostStatus, LeaseStatus, SeatWait
from fractional_gpu.protocol.names import device_deadline, gpu_deadline, host_deadline, state_words

BAR_CELLS = 24
MOST_STRANGERS = 3  # named in a device's line
SHORT_ID = 8
_WHOLE = 1000  # a device, thousandths
_NARROWEST = 8  # characters of a column: a narrower one is not read any more
_GAP = "  "
_LEGEND = "#  used    =  reserved    x  other programs    .  free"


def short_id(lease_id: str) -> str:
    """Return the beginning of a lease id, which is enough to name the lease."""
    return lease_id[:SHORT_ID]


def lease_name(lease: LeaseStatus) -> str:
    """Return `label (id)`, or the id alone where there is no label."""
    return f"{lease.label} ({short_id(lease.lease_id)})" if lease.label else short_id(lease.lease_id)


def describe_device(name: str, memory_mib: int, *, simulated: bool) -> str:
    """Return a device's name; its memory and "simulated" are added unless the name has them."""
    parts = [name]
    if simulated and "simulated" not in name.lower():
        parts.append("simulated")
    memory = format_memory(memory_mib)
    return ", ".join(parts if memory in name else [*parts, memory])


def describe_state(lease: LeaseStatus) -> str:
    """Return the lease's state, and for how long it has been in it."""
    words = state_words(lease.state)
    if lease.state == "resident":
        words += ", working in the background" if lease.working else ", busy" if lease.busy else ", idle"
    pinned = f", pinned for {format_duration(lease.pinned_ms)}" if lease.pinned_ms else ""
    return f"{words}, {format_duration(lease.age_ms)}{pinned}"


def expected_wait(lease: LeaseStatus) -> str:
    """Return how long the lease is expected to wait, as the end of a sentence; empty if there is no forecast."""
    if lease.expected_ms is None or lease.low_ms is None or lease.high_ms is None:
        return ""
    return f"; {format_forecast(lease.expected_ms, lease.low_ms, lease.high_ms)}"


def bar(device: DeviceStatus, cells: int = BAR_CELLS) -> str:
    """Return the device's memory as a row of `cells` characters: other programs, used, reserved, free.

    A part that exists gets at least one cell, as long as there are cells left.
    """
    used_by_leases = max(0, device.used_mib - device.stranger_mib)
    parts = (
        ("x", device.stranger_mib),
        ("#", used_by_leases),
        ("=", max(0, device.reserved_mib - used_by_leases)),
    )
    row = ""
    for symbol, mib in parts:
        if mib > 0:
            row += symbol * max(1, round(cells * mib / max(1, device.memory_mib)))
    return row[:cells].ljust(cells, ".")


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    indent: str = "  ",
    width: int | None = None,
    *,
    figures_from: int | None = None,
) -> list[str]:
    """Return aligned lines, columns two spaces apart, without trailing blanks. From the column `figures_from` on, to the right.

    With a `width` in characters the widest columns are made narrower until a line fits, and their cells broken into several lines.
    """
    everything = [header, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(header))]
    if figures_from is not None:
        figures = slice(figures_from, None)
        everything = [
            [
                *row[:figures_from],
                *(cell.rjust(most) for cell, most in zip(row[figures], widths[figures], strict=True)),
            ]
            for row in everything
        ]
    if width is not None:
        room = width - len(indent) - len(_GAP) * (len(header) - 1)
        while sum(widths) > room and max(widths) > _NARROWEST:
            widths[widths.index(max(widths))] -= 1
    return [line for row in everything for line in _row(row, widths, indent)]


def _row(row: Sequence[str], widths: Sequence[int], indent: str) -> list[str]:
    """Return one row of a table: as many lines as its highest cell has."""
    cells = [textwrap.wrap(cell, max(1, width)) or [""] for cell, width in zip(row, widths, strict=True)]
    return [
        (indent + _GAP.join(part.ljust(width) for part, width in zip(parts, widths, strict=True))).rstrip()
        for parts in zip_longest(*cells, fillvalue="")
    ]


def wrap_lines(lines: Iterable[str], width: int | None) -> list[str]:
    """Return lines of at most `width` characters (None: any): longer lines are wrapped and indented; paths stay whole."""
    if width is None:
        return list(lines)
    fit: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        room = max(width, len(indent) + _NARROWEST)
        fit += textwrap.wrap(line, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [
            ""
        ]
    return fit


def describe_demand(device: DeviceStatus) -> str:
    """Return what the device's busy kernels need of it."""
    slowed = ", so they slow each other down" if device.demand_milli > _WHOLE else ""
    return f"busy kernels need {device.demand_milli // 10} % of its compute{slowed}"


def _device_lines(device: DeviceStatus, *, simulated: bool) -> list[str]:
    """Return one device's lines: its name, its bar and, if it admits no kernel, why."""
    sums = f"{format_memory(device.reserved_mib)} reserved, {format_memory(device.used_mib)} used"
    lines = [
        f"  {device.index}  {device.name}  pool {device.pool or '-'}",
        f"     [{bar(device)}]  {sums} of {format_memory(device.memory_mib)}",
    ]
    readings = [
        (device.busy_percent, "% busy", 1),
        (device.temperature_c, " °C", 1),
        (device.power_mw, " W", 1000),
    ]
    sensors = [f"{round(value / per)}{unit}" for value, unit, per in readings if value is not None]
    if sensors:
        lines.append(f"     {', '.join(sensors)}{' (simulated)' if simulated else ''}")
    if device.demand_milli:
        lines.append(f"     {describe_demand(device)}")
    if device.stranger_mib:
        who = ", ".join(f"process {one.pid} of {one.user}" for one in device.strangers[:MOST_STRANGERS])
        more = len(device.strangers) - MOST_STRANGERS
        named = f": {who}{f' and {more} more' if more > 0 else ''}" if who else ""
        lines.append(f"     other programs hold {format_memory(device.stranger_mib)}{named}")
    if device.why_not:
        lines.append(f"     kernels there stay on it: {device.why_not}")
    if device.lost:
        lines.append("     lost: the device does not answer; it admits no kernel until it does")
    elif device.draining:
        when = f"; it {deadline}" if (deadline := device_deadline(device)) else ""
        lines.append(f"     draining: it admits no kernel, and those on it are suspended{when}")
    elif device.over_committed:
        lines.append("     over-committed: more is held than fits; it admits no kernel until that changes")
    return lines


def _lease_row(lease: LeaseStatus) -> tuple[str, ...]:
    memory = f"{format_memory(lease.used_mib)} of {format_memory(lease.reserve_mib)}"
    saved = format_memory(lease.saved_mib) if lease.saved_mib else "-"
    return (
        short_id(lease.lease_id),
        f"{lease.label or '-'} (command)" if lease.kind == COMMAND else lease.label or "-",
        format_fraction(lease.fraction_milli),
        describe_state(lease),
        memory,
        saved,
    )


def _left_line(lease: LeaseStatus) -> str:
    processes = ", ".join(
        f"process {one.pid} ({one.command})" + (f" with {format_memory(one.used_mib)}" if one.used_mib else "")
        for one in lease.left
    )
    end = f"`jupyter gpu end {short_id(lease.lease_id)}` ends it"
    return f"  {lease_name(lease)}: its kernel has ended, and {processes} still has device memory; {end}"


def render_leases(leases: Sequence[LeaseStatus], width: int | None = None) -> list[str]:
    """Return a table of the leases, and under it why each of those that wait does."""
    header = ("LEASE", "KERNEL", "GPU", "STATE", "MEMORY", "SAVED")
    lines = table(header, [_lease_row(lease) for lease in leases], width=width)
    lines += [f"  {lease_name(lease)} cannot be suspended: {lease.stays}" for lease in leases if lease.stays]
    lines += [f"  {lease_name(lease)}: {deadline}" for lease in leases if (deadline := gpu_deadline(lease))]
    lines += [_left_line(lease) for lease in leases if lease.left]
    waiting = sorted((lease for lease in leases if lease.position is not None), key=lambda lease: lease.position or 0)
    if waiting:
        lines.append("  waiting:")
        lines += [
            f"    {lease.position}. {lease_name(lease)}: {lease.sentence or 'waits for its turn'}{expected_wait(lease)}"
            for lease in waiting
        ]
    return lines


def render_seats(status: HostStatus, width: int | None = None) -> list[str]:
    """Return a table of the servers with a seat, and under it the requests that wait for one."""
    rows = [
        (
            _server(seat.owner, seat.server),
            seat.pool,
            format_fraction(seat.fraction_milli),
            format_memory(seat.memory_mib),
            f"{seat.kernels}, {format_fraction(seat.used_milli)} GPU" if seat.kernels else "none",
            format_duration(seat.age_ms),
        )
        for seat in status.seats
    ]
    lines = table(("SERVER", "POOL", "GPU", "MEMORY", "KERNELS", "SINCE"), rows, width=width) if rows else []
    lines += [f"  {_server(seat.owner, seat.server)}: {seat.warning}" for seat in status.seats if seat.warning]
    for pool in dict.fromkeys(wait.pool for wait in status.seat_queue):
        lines.append(f"  waiting for a seat of pool {pool}:")
        lines += [_seat_wait(wait) for wait in status.seat_queue if wait.pool == pool]
    return lines


def _seat_wait(wait: SeatWait) -> str:
    asked = f"{format_fraction(wait.fraction_milli)} GPU, {format_memory(wait.memory_mib)}"
    left = "" if wait.expected_ms is None else format_forecast(wait.expected_ms, wait.low_ms, wait.high_ms, more=True)
    expected = f"; {left}" if left else ""
    passed = f"; {wait.passed_over} smaller ones were given before it" if wait.passed_over else ""
    return f"    {wait.position}. {_server(wait.owner, wait.server)}: {asked}, for {format_duration(wait.waited_ms)}{expected}{passed}"


def _server(owner: str, name: str) -> str:
    return f"{owner}/{name}" if name else owner


def render_status(status: HostStatus, width: int | None = None) -> str:
    """Return the whole status, ending in a newline. `width`: of the terminal, in characters."""
    lines = ["GPUs (simulated: no real GPU is involved)" if status.simulated else "GPUs"]
    for device in sorted(status.devices, key=lambda device: device.index):
        lines += _device_lines(device, simulated=status.simulated)
    lines.append(f"     {_LEGEND}" if status.devices else "  none: this machine has no GPU that can be shared")
    lines += ["", "Kernels"]
    lines += render_leases(status.leases, width) if status.leases else ["  none holds or waits for a GPU"]
    if seats := render_seats(status, width):
        lines += ["", "Seats of a hub's servers", *seats]
    lines += [
        "",
        f"Host memory: {format_memory(status.host_saved_mib)} saved of {format_memory(status.host_budget_mib)} for suspended kernels",
        f"Broker {status.version}, process {status.pid}, {status.socket}",
    ]
    if status.goes_away_in_ms is not None:
        lines += ["", f"This machine is revoked: {host_deadline(status.goes_away_in_ms)}."]
    if status.trouble:
        lines += ["", f"Trouble: {status.trouble}."]
    return "\n".join(wrap_lines(lines, width)) + "\n"
