"""Leases and devices in words: what sentences of several commands have in common. No word of it can control a terminal."""

import os

from fractional_gpu.commands.terminal.layout import harmless
from fractional_gpu.core.units import format_duration, format_forecast, format_memory
from fractional_gpu.protocol.names import state_words
from fractional_gpu.protocol.status import LeaseStatus

SHORT_ID = 8


def short_id(lease_id: str) -> str:
    """Return the beginning of a lease id, which is enough to name the lease."""
    return lease_id[:SHORT_ID]


def short_path(label: str, most: int) -> str:
    """Return a path of at most `most` characters, and its last part in any case: `~/.../name.ipynb`. Other labels are unchanged."""
    if len(label) <= most or not (label.startswith("/") or label.endswith(".ipynb")) or "/" not in label:
        return label
    start = "~/..." if label.startswith(os.path.expanduser("~/")) else "..."  # noqa: PTH111 - without HOME, too
    ends = [label[place:] for place, letter in enumerate(label) if letter == "/"]
    return start + next((one for one in ends if len(start + one) <= most), ends[-1])


def lease_name(lease: LeaseStatus) -> str:
    """Return `label (id)`, or the id alone where there is no label."""
    return (
        f"{harmless(lease.spec.label)} ({short_id(lease.lease_id)})" if lease.spec.label else short_id(lease.lease_id)
    )


def describe_device(name: str, memory_mib: int, *, simulated: bool) -> str:
    """Return a device's name; its memory and "simulated" are added unless the name has them."""
    parts = [harmless(name)]
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
    wait = lease.expected
    return "" if wait is None else f"; {format_forecast(wait.expected_ms, wait.low_ms, wait.high_ms)}"
