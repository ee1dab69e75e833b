"""Formats the broker's status, leases and devices as text. These are pure functions that need neither a terminal nor a clock."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from fractional_gpu.commands.terminal.text import Piece, Style, fitted, harmless, line, table
from fractional_gpu.core.units import format_duration, format_forecast, format_fraction, format_memory
from fractional_gpu.protocol.messages import CLAIM, KERNEL
from fractional_gpu.protocol.names import device_deadline, gpu_deadline, host_deadline, state_words
from fractional_gpu.protocol.status import DeviceStatus, HostStatus, LeaseStatus, SeatWait, describe_strangers

if TYPE_CHECKING:
    from rich.text import Text

SHORT_ID = 8


def short_id(lease_id: str) -> str:
    return lease_id[:SHORT_ID]


def short_path(label: str, most: int) -> str:
    """Shorten a path to `most` characters, keeping its last component, as in `~/.../name.ipynb`. Leave other labels unchanged."""
    if len(label) <= most or not (label.startswith("/") or label.endswith(".ipynb")) or "/" not in label:
        return label
    start = "~/..." if label.startswith(os.path.expanduser("~/")) else "..."  # noqa: PTH111 - without HOME, too
    ends = [label[place:] for place, letter in enumerate(label) if letter == "/"]
    return start + next((one for one in ends if len(start + one) <= most), ends[-1])


def lease_name(lease: LeaseStatus) -> str:
    return (
        f"{harmless(lease.spec.label)} ({short_id(lease.lease_id)})" if lease.spec.label else short_id(lease.lease_id)
    )


def describe_device(name: str, memory_mib: int, *, simulated: bool) -> str:
    parts = [harmless(name)]
    if simulated and "simulated" not in name.lower():
        parts.append("simulated")
    memory = format_memory(memory_mib)
    return ", ".join(parts if memory in name else [*parts, memory])


def describe_state(lease: LeaseStatus) -> str:
    words = state_words(lease.state)
    if lease.state == "resident":
        words += ", working in the background" if lease.working else ", busy" if lease.busy else ", idle"
    what = "claimed" if lease.kind == CLAIM else "pinned"
    pinned = f", {what} for {format_duration(lease.pinned_ms)}" if lease.pinned_ms else ""
    return f"{words}, {format_duration(lease.age_ms)}{pinned}"


def expected_wait(lease: LeaseStatus) -> str:
    wait = lease.expected
    return "" if wait is None else f"; {format_forecast(wait.expected_ms, wait.low_ms, wait.high_ms)}"


BAR_CELLS = 24
_WHOLE = 1000  # a device, in thousandths
_USED, _RESERVED, _OTHERS = ("#", Style.USED), ("=", Style.RESERVED), ("x", Style.OTHERS)  # of a bar
_LEGEND = ("     ", _USED, "  used    ", _RESERVED, "  reserved    ", _OTHERS, "  other programs    .  free")


def bar(device: DeviceStatus, cells: int = BAR_CELLS) -> "Text":
    """Draw the device's memory as a row of `cells` characters. Any memory in use gets at least one character, if there is space left."""
    used_by_leases = max(0, device.used_mib - device.stranger_mib)
    parts = (
        (_OTHERS, device.stranger_mib),
        (_USED, used_by_leases),
        (_RESERVED, max(0, device.reserved_mib - used_by_leases)),
    )
    pieces: list[Piece] = []
    left = cells
    for (symbol, style), mib in parts:
        if mib > 0:
            count = min(left, max(1, round(cells * mib / max(1, device.memory_mib))))
            pieces.append((symbol * count, style))
            left -= count
    return line(*pieces, "." * left)


def _device_lines(device: DeviceStatus, *, simulated: bool) -> "list[Text]":
    sums = f"{format_memory(device.reserved_mib)} reserved, {format_memory(device.used_mib)} used"
    lines = [
        line(f"  {device.index}  {device.name}  pool {device.pool or '-'}"),
        line("     [", bar(device), f"]  {sums} of {format_memory(device.memory_mib)}"),
    ]
    readings = [
        (device.busy_percent, "% busy", 1),
        (device.temperature_c, " °C", 1),
        (device.power_mw, " W", 1000),
    ]
    sensors = [f"{round(value / per)}{unit}" for value, unit, per in readings if value is not None]
    if sensors:
        lines.append(line(f"     {', '.join(sensors)}{' (simulated)' if simulated else ''}"))
    if device.demand_milli:
        slowed = ", so they slow each other down" if device.demand_milli > _WHOLE else ""
        lines.append(line(f"     busy kernels need {device.demand_milli // 10} % of its compute{slowed}"))
    if device.stranger_mib:
        named = f": {who}" if (who := describe_strangers(device.strangers)) else ""
        lines.append(line(f"     other programs hold {format_memory(device.stranger_mib)}{named}"))
    if device.why_not:
        lines.append(line(f"     its kernels cannot be suspended: {device.why_not}"))
    if device.lost:
        lines.append(
            line("     ", ("lost", Style.WRONG), ": the device is not responding; it accepts no kernels until it does")
        )
    elif device.draining:
        when = f"; it {deadline}" if (deadline := device_deadline(device)) else ""
        said = f": it accepts no new kernels, and those on it are suspended{when}"
        lines.append(line("     ", ("draining", Style.ATTENTION), said))
    elif device.over_committed:
        said = ": kernels hold more memory than it has; it accepts no new kernels until that changes"
        lines.append(line("     ", ("over-committed", Style.WRONG), said))
    return lines


def _lease_row(lease: LeaseStatus) -> tuple[Piece, ...]:
    memory = f"{format_memory(lease.lease.used_mib)} of {format_memory(lease.spec.reserve_mib)}"
    saved = format_memory(lease.lease.saved_mib) if lease.lease.saved_mib else "-"
    style = Style.WRONG if lease.state == "quarantined" else Style.ATTENTION if lease.position is not None else ""
    return (
        short_id(lease.lease_id),
        lease.spec.label or "-" if lease.kind == KERNEL else f"{lease.spec.label or '-'} ({lease.kind})",
        format_fraction(lease.spec.fraction_milli),
        (describe_state(lease), style),
        memory,
        saved,
        lease.spec.owner,
    )


def _left_line(lease: LeaseStatus) -> str:
    processes = ", ".join(
        f"process {one.pid} ({one.command})" + (f" with {format_memory(one.used_mib)}" if one.used_mib else "")
        for one in lease.left
    )
    end = f"`jupyter gpu end {short_id(lease.lease_id)}` ends {'it' if len(lease.left) == 1 else 'them'}"
    return f"  {lease_name(lease)}: its kernel has ended, but GPU memory is still held by {processes}; {end}"


def render_leases(leases: Sequence[LeaseStatus], width: int | None = None) -> "list[Text]":
    """Return a table of the leases, followed by notes and the reasons leases are waiting. Paths are shortened to fit in `width`."""
    users = {(lease.spec.owner, lease.spec.uid) for lease in leases}
    is_own = len(users) == 1 and users.pop()[1] in (None, os.geteuid())
    header = ("LEASE", "KERNEL", "GPU", "STATE", "MEMORY", "SAVED", "USER")[: 6 if is_own else 7]
    lines = table(header, [_lease_row(lease)[: len(header)] for lease in leases])
    if width is not None and (over := max(one.cell_len for one in lines) - width) > 0:
        most = max(len(lease.spec.label) for lease in leases) - over
        short = [replace(lease.spec, label=short_path(lease.spec.label, most)) for lease in leases]
        leases = [
            structs.replace(lease, lease=replace(lease.lease, spec=spec))
            for lease, spec in zip(leases, short, strict=True)
        ]
        whole = 2 * (max(len(lease.spec.label) for lease in leases) <= width // 2)
        lines = table(header, [_lease_row(lease)[: len(header)] for lease in leases], width=width, whole=whole)
    lines += [
        line(f"  {lease_name(lease)} cannot be suspended: {lease.lease.unsuspendable_reason}")
        for lease in leases
        if lease.lease.unsuspendable_reason
    ]
    lines += [line(f"  {lease_name(lease)}: {lease.note}") for lease in leases if lease.note]
    for lease in leases:
        if deadline := gpu_deadline(lease):
            lines.append(line(f"  {lease_name(lease)}: ", (deadline, Style.ATTENTION)))
    lines += [line(_left_line(lease)) for lease in leases if lease.left]
    waiting = sorted((lease for lease in leases if lease.position is not None), key=lambda lease: lease.position or 0)
    if waiting:
        lines.append(line("  ", ("waiting:", Style.ATTENTION)))
    for lease in waiting:
        said = lease.sentence or "waits for its turn"
        lines.append(line(f"    {lease.position}. {lease_name(lease)}: {said}{expected_wait(lease)}"))
    return lines


def render_seats(status: HostStatus, width: int | None = None) -> "list[Text]":
    rows = [
        (
            server_name(seat.owner, seat.server),
            seat.pool,
            format_fraction(seat.fraction_milli),
            format_memory(seat.memory_mib),
            f"{seat.kernels}, {format_fraction(seat.used_milli)} GPU" if seat.kernels else "none",
            format_duration(seat.age_ms),
        )
        for seat in status.seats
    ]
    lines = table(("SERVER", "POOL", "GPU", "MEMORY", "KERNELS", "SINCE"), rows, width=width) if rows else []
    for seat in status.seats:
        if seat.warning:
            lines.append(line(f"  {server_name(seat.owner, seat.server)}: ", (seat.warning, Style.ATTENTION)))
    for pool in dict.fromkeys(wait.pool for wait in status.seat_queue):
        lines.append(line("  ", (f"waiting for a seat of pool {pool}:", Style.ATTENTION)))
        lines += [line(_seat_wait(wait)) for wait in status.seat_queue if wait.pool == pool]
    return lines


def _seat_wait(wait: SeatWait) -> str:
    asked = f"{format_fraction(wait.fraction_milli)} GPU, {format_memory(wait.memory_mib)}"
    left = "" if wait.expected_ms is None else format_forecast(wait.expected_ms, wait.low_ms, wait.high_ms, more=True)
    expected = f"; {left}" if left else ""
    passed = f"; {wait.passed_over} smaller ones went ahead of it" if wait.passed_over else ""
    return f"    {wait.position}. {server_name(wait.owner, wait.server)}: {asked}, for {format_duration(wait.waited_ms)}{expected}{passed}"


def server_name(owner: str, name: str) -> str:
    return f"{owner}/{name}" if name else owner


def render_status(status: HostStatus, width: int | None = None) -> "list[Text]":
    simulated = " (simulated: no real GPU is involved)" if status.simulated else ""
    lines = [line(("GPUs", Style.HEADING), simulated)]
    for device in sorted(status.devices, key=lambda device: device.index):
        lines += _device_lines(device, simulated=status.simulated)
    lines.append(line(*_LEGEND) if status.devices else line("  none: this machine has no GPU that can be shared"))
    lines += [line(), line(("Kernels", Style.HEADING))]
    lines += render_leases(status.leases, width) if status.leases else [line("  none holds or waits for a GPU")]
    if seats := render_seats(status, width):
        lines += [line(), line(("Seats", Style.HEADING)), *seats]
    saved, budget = format_memory(status.host_saved_mib), format_memory(status.host_budget_mib)
    lines += [
        line(),
        line(f"Host memory: {saved} saved of {budget} for suspended kernels"),
        line(f"Broker {status.version}, process {status.pid}, {status.socket}"),
    ]
    if status.goes_away_in_ms is not None:
        revoked = f": {host_deadline(status.goes_away_in_ms)}."
        lines += [line(), line(("This machine is revoked", Style.WRONG), revoked)]
    if status.trouble:
        lines += [line(), line(("Trouble", Style.WRONG), f": {status.trouble}.")]
    return fitted(lines, width)
