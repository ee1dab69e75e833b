"""Views for the page and the API, limited to what a user may see. Sizes include units, and reasons are sentences. All functions are pure.

Users see their own seats and kernels, and only per-device totals for everyone else's. Administrators see everything. A kernel belongs to
its seat's user. A kernel without a seat belongs to a user of the machine, who may have the same name as a different hub user.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from msgspec.structs import replace

from fractional_gpu.config import COMMON_POOL_KEYS, POOL_KEYS
from fractional_gpu.core.units import (
    format_duration,
    format_forecast,
    format_fraction,
    format_memory,
    host_capacity,
    plural,
)
from fractional_gpu.protocol.names import device_deadline, host_deadline, lease_deadline, state_words
from fractional_gpu.protocol.status import DeviceStatus, HostStatus, LeaseStatus, SeatStatus, describe_strangers
from fractional_gpu_hub.service.broker_follower import Snapshot

_MOST_PERCENT = 100
_WHOLE = 1000  # a whole device, in milli-GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    name: str
    admin: bool
    groups: tuple[str, ...] = ()


def is_own(lease: LeaseStatus, viewer: Viewer) -> bool:
    return bool(lease.spec.seat) and lease.spec.owner == viewer.name


def view_of(snapshot: Snapshot, viewer: Viewer) -> dict[str, Any]:
    status = snapshot.status
    leases = status.leases if status is not None else []
    shown = [lease for lease in leases if viewer.admin or is_own(lease, viewer)]
    servers = {seat.seat_id: seat.server for seat in snapshot.seats.seats}
    seats = [seat for seat in snapshot.seats.seats if viewer.admin or seat.owner == viewer.name]
    names = {device.device_id: _device_name(device) for device in (status.devices if status is not None else [])}
    return {
        "you": {"name": viewer.name, "admin": viewer.admin},
        "problem": snapshot.problem or snapshot.refused,
        "simulated": status is not None and status.simulated,
        "summary": _summary(status, shown, viewer) if status is not None else "",
        "devices": [_device(one, leases, viewer) for one in status.devices] if status is not None else [],
        "kernels": [_kernel(lease, servers, names, viewer) for lease in sorted(shown, key=_order)],
        "seats": [_seat(seat, names, viewer) for seat in seats],
        "pools": _pools(snapshot, viewer),
    }


def _summary(status: HostStatus, shown: list[LeaseStatus], viewer: Viewer) -> str:
    waiting = sum(lease.position is not None for lease in shown)
    suspended = sum(lease.state == "suspended" for lease in shown)
    parts = [
        ("" if viewer.admin else "you have ") + plural(len(shown), "kernel"),
        f"{waiting} waiting",
        f"{suspended} suspended",
        f"{format_memory(status.host_saved_mib)} of {format_memory(status.host_budget_mib)} host memory used by suspended kernels",
    ]
    largest = max(status.devices, key=lambda one: one.memory_mib, default=None)
    if viewer.admin and largest is not None and status.pools.get(largest.pool):
        parts[-1] += f" ({host_capacity(status.host_budget_mib, largest.memory_mib, status.pools[largest.pool][0])})"
    if status.goes_away_in_ms is not None:
        parts.append(f"this machine is being revoked: {host_deadline(status.goes_away_in_ms)}")
    return ", ".join(parts)


def _device_name(device: DeviceStatus) -> str:
    return f"GPU {device.index}"


def _device(device: DeviceStatus, leases: Iterable[LeaseStatus], viewer: Viewer) -> dict[str, Any]:
    there = [lease for lease in leases if device.device_id in lease.lease.device_ids]
    return {
        "id": device.device_id,
        "name": _device_name(device),
        "model": device.name,
        "pool": device.pool or "none",
        "memory": f"{format_memory(device.reserved_mib)} of {format_memory(device.leasable_mib)} reserved",
        "memory_note": f"{format_memory(device.used_mib)} in use",
        "level": min(_MOST_PERCENT, _MOST_PERCENT * device.reserved_mib // max(1, device.leasable_mib)),
        "kernels": _kernels_there([lease for lease in there if lease.lease.reserved_mib], viewer),
        "compute": f"{device.demand_milli // 10} % needed",
        "compute_note": "by busy kernels" + (", which slow each other down" if device.demand_milli > _WHOLE else ""),
        "demand": min(_MOST_PERCENT, device.demand_milli // 10),
        "state": _device_state(device),
        "note": "; ".join(_device_notes(device, viewer)),
        "draining": device.draining,
        "actions": [] if not viewer.admin else ["undrain"] if device.draining else ["drain"],
    }


def _kernels_there(there: list[LeaseStatus], viewer: Viewer) -> str:
    own = [lease for lease in there if viewer.admin or is_own(lease, viewer)]
    others = len(there) - len(own)
    parts = []
    if own or not others:
        parts.append(f"{len(own)} {'' if viewer.admin else 'of yours'}".strip())
    if others:
        held = sum(lease.lease.reserved_mib for lease in there) - sum(lease.lease.reserved_mib for lease in own)
        parts.append(f"{others} from other users ({format_memory(held)})")
    return ", ".join(parts)


def _device_state(device: DeviceStatus) -> str:
    if device.lost:
        return "lost"
    if device.goes_away_in_ms and device.reserved_mib:
        return "going away"
    if device.draining:
        return "emptied" if not device.reserved_mib else "being emptied"
    return "over-committed" if device.over_committed else "in service"


def _device_notes(device: DeviceStatus, viewer: Viewer) -> list[str]:
    notes = []
    if deadline := device_deadline(device):
        notes.append(f"it {deadline}")
    if device.lost:
        notes.append("it is not responding, and gets no new kernels until it does")
    if device.stranger_mib:
        # The hub's user requested the status, so programs of that user do not belong to the viewer of the page.
        seen = [replace(one, own=False) for one in device.strangers] if viewer.admin else []
        named = f": {who}" if (who := describe_strangers(seen)) else ""
        notes.append(f"other programs hold {format_memory(device.stranger_mib)}{named}")
    if device.why_not:
        notes.append(f"its kernels cannot be suspended: {device.why_not}")
    readings = [(device.busy_percent, "% busy", 1), (device.temperature_c, " °C", 1), (device.power_mw, " W", 1000)]
    if sensors := [f"{round(value / per)}{unit}" for value, unit, per in readings if value is not None]:
        notes.append(", ".join(sensors))
    return notes


def _order(lease: LeaseStatus) -> tuple[int, int, str, str]:
    """Return a sort key that puts waiting kernels first, in queue order."""
    return (lease.position is None, lease.position or 0, lease.spec.owner, lease.lease_id)


def _kernel(lease: LeaseStatus, servers: dict[str, str], names: dict[str, str], viewer: Viewer) -> dict[str, Any]:
    return {
        "id": lease.lease_id,
        "name": lease.spec.label or lease.lease_id[:8],
        "short": lease.lease_id[:8],
        "owner": lease.spec.owner if lease.spec.seat else f"{lease.spec.owner} (not from a server)",
        "server": servers.get(lease.spec.seat, "") or ("default server" if lease.spec.seat else ""),
        "share": f"{format_fraction(lease.spec.fraction_milli)} GPU"
        + (f" x {len(lease.lease.device_ids)}" if len(lease.lease.device_ids) > 1 else ""),
        "pool": lease.spec.pool,
        "state": _state(lease),
        "note": _why(lease),
        "memory": _memory(lease),
        "where": _where(lease, names),
        "waits": lease.position is not None,
        "phase": lease.state,
        "actions": _kernel_actions(lease, viewer),
    }


def _state(lease: LeaseStatus) -> str:
    if lease.position is not None:
        return f"waiting, place {lease.position}"
    if lease.state == "resident":
        words = "in use" if lease.busy else "idle on the GPU"
        words = "working in the background" if lease.working else words
    else:
        words = state_words(lease.state)
    pinned_s = -(-lease.pinned_ms // 1000)
    return words + (f", pinned for {format_duration(pinned_s * 1000)}" if pinned_s else "")


def _why(lease: LeaseStatus) -> str:
    sentence = lease.sentence[:1].upper() + lease.sentence[1:] if lease.sentence else ""
    parts = [sentence] if sentence else []
    if lease.position is not None and (wait := lease.expected) is not None:
        left = format_forecast(wait.expected_ms, wait.low_ms, wait.high_ms, more=True)
        parts.append(left[:1].upper() + left[1:])
    if deadline := lease_deadline(lease):
        parts.append(deadline[:1].upper() + deadline[1:])
    if lease.lease.unsuspendable_reason:
        parts.append(f"Cannot be suspended: {lease.lease.unsuspendable_reason}")
    return ". ".join(part.rstrip(".") for part in parts) + ("." if parts else "")


def _memory(lease: LeaseStatus) -> str:
    if lease.state in {"suspended", "resuming"} and lease.lease.saved_mib:
        return f"{format_memory(lease.lease.saved_mib)} in host memory"
    if lease.lease.reserved_mib:
        return f"{format_memory(lease.lease.used_mib)} of {format_memory(lease.spec.reserve_mib)} on the GPU"
    return f"none of {format_memory(lease.spec.reserve_mib)}"


def _where(lease: LeaseStatus, names: dict[str, str]) -> str:
    if lease.state == "suspended":
        return "host memory" if lease.lease.saved_mib else "none"
    there = [names.get(device_id, device_id[:12]) for device_id in lease.lease.device_ids]
    return ", ".join(there) or "none"


def _kernel_actions(lease: LeaseStatus, viewer: Viewer) -> list[str]:
    actions = []
    if lease.state == "resident":
        actions += ["suspend", "unpin" if lease.pinned_ms else "pin"]
    elif lease.state == "suspended":
        actions.append("resume")
    if viewer.admin:
        actions += ["move"] if lease.state == "resident" and len(lease.lease.device_ids) == 1 else []
        actions.append("evict")
    return [*actions, "story"]


def _seat(seat: SeatStatus, names: dict[str, str], viewer: Viewer) -> dict[str, Any]:
    kernels = "no kernel" if not seat.kernels else plural(seat.kernels, "kernel")
    return {
        "id": seat.seat_id,
        "owner": seat.owner,
        "server": seat.server or "default server",
        "pool": seat.pool,
        "group": seat.group,
        "share": f"{format_fraction(seat.fraction_milli)} GPU, {format_memory(seat.memory_mib)}",
        "use": f"{kernels} with {format_fraction(seat.used_milli)} GPU" if seat.used_milli else kernels,
        "where": names.get(seat.device_id or "", "any"),
        "name": f"the seat of {seat.server or 'the default server'}",
        "actions": ["release"] if viewer.admin else [],
    }


def _pools(snapshot: Snapshot, viewer: Viewer) -> list[dict[str, Any]]:
    status, all_keys, rows = snapshot.status, {pool.pool: pool for pool in snapshot.pools.pools}, []
    if status is None:
        return []
    for name, milli in sorted(status.pools.items()):
        waiting, keys = snapshot.seats.waiting.get(name, 0), all_keys.get(name)
        row: dict[str, Any] = {
            "id": name,
            "name": name,
            "fractions": ", ".join(format_fraction(one) for one in milli) or "any",
            "devices": sum(device.pool == name for device in status.devices),
            "waiting": f"{plural(waiting, 'server')} waiting for a place" if waiting else "none",
            "actions": [],
        }
        if viewer.admin and keys is not None:
            row |= {"keys": keys.keys, "changed": ", ".join(keys.changed) or "nothing", "actions": ["edit"]}
        rows.append(row)
    return rows


class Setting(NamedTuple):
    """A setting in the page's pool editor. `default` and `example` look the way a user would type them. `choices` are menu items."""

    key: str
    help: str
    default: str
    example: str
    boolean: bool
    choices: tuple[str, ...]


class PoolSettings(NamedTuple):
    common: list[Setting]
    others: list[Setting]


@cache
def pool_settings() -> PoolSettings:
    shown = {}
    for key, rule in POOL_KEYS.items():
        # Text is typed without quotes, and other values are typed as JSON.
        default, example = (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for value in (rule.default_value, rule.example)
        )
        choices = tuple(rule.default_value) if isinstance(rule.default_value, list) else ()
        text = rule.help.removeprefix("Hub: ")
        text = text[:1].upper() + text[1:]
        shown[key] = Setting(key, text, default, example, isinstance(rule.default_value, bool), choices)
    others = [one for key, one in shown.items() if key != "devices" and key not in COMMON_POOL_KEYS]
    return PoolSettings([shown[key] for key in COMMON_POOL_KEYS], others)
