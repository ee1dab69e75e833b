"""The events that browsers get, as plain data: pure functions of the broker's messages.

The server's event logger checks each event against its schema. Memory in MiB, fractions in milli-GPU, durations in milliseconds.
"""

from collections.abc import Container, Mapping
from typing import Any

from fractional_gpu.protocol.messages import DeviceStatus, HostStatus, LeaseStatus

__all__ = ["NOTICE_ID", "NOTICE_SCHEMA", "STATE_ID", "STATE_SCHEMA", "state"]

STATE_ID = "urn:jupyter-fractional-gpu:state:v1"
NOTICE_ID = "urn:jupyter-fractional-gpu:notice:v1"

_KERNEL_FIELDS = (
    "kernel_id",
    "state",
    "pool",
    "fraction_milli",
    "reserve_mib",
    "used_mib",
    "saved_mib",
    "device_name",
    "simulated",
    "busy",
    "reason",
    "sentence",
    "position",
    "expected_ms",
    "resume_ms",
    "pinned_ms",
)
_DEVICE_FIELDS = (
    "index",
    "name",
    "pool",
    "memory_mib",
    "used_mib",
    "reserved_mib",
    "over_committed",
    "lost",
    "draining",
)
_TYPES: Mapping[str, Mapping[str, Any]] = {
    "kernel_id": {"type": "string"},
    "state": {"type": "string"},
    "pool": {"type": "string"},
    "device_name": {"type": "string"},
    "name": {"type": "string"},
    "reason": {"type": "string"},
    "sentence": {"type": "string"},
    "simulated": {"type": "boolean"},
    "busy": {"type": "boolean"},
    "over_committed": {"type": "boolean"},
    "lost": {"type": "boolean"},
    "draining": {"type": "boolean"},
    "position": {"type": ["integer", "null"]},
    "expected_ms": {"type": ["integer", "null"]},
    "resume_ms": {"type": ["integer", "null"]},
}


def _items(fields: tuple[str, ...]) -> dict[str, Any]:
    properties = {name: _TYPES.get(name, {"type": "integer"}) for name in fields}
    return {"type": "object", "additionalProperties": False, "required": list(fields), "properties": properties}


STATE_SCHEMA: Mapping[str, Any] = {
    "$id": STATE_ID,
    "version": "1",
    "title": "The GPU kernels of this server",
    "description": "All of it, whenever something changed. Without a broker there are no devices and no kernels.",
    "personal-data": True,
    "type": "object",
    "required": ["broker", "simulated", "kernels", "devices"],
    "properties": {
        "broker": {"type": "boolean"},
        "simulated": {"type": "boolean"},
        "kernels": {"type": "array", "items": _items(_KERNEL_FIELDS)},
        "devices": {"type": "array", "items": _items(_DEVICE_FIELDS)},
    },
}
NOTICE_SCHEMA: Mapping[str, Any] = {
    "$id": NOTICE_ID,
    "version": "1",
    "title": "A notice about a kernel that nothing else shows",
    "description": "A kernel that could not be restarted, or that was started without a GPU.",
    "personal-data": True,
    "type": "object",
    "required": ["kernel_id", "sentence"],
    "properties": {"kernel_id": {"type": "string"}, "sentence": {"type": "string"}},
}


def state(status: HostStatus | None, kernel_ids: Container[str]) -> dict[str, Any]:
    """Return the state that browsers show: the devices, and the kernels of this server (`kernel_ids`). None: no broker answers."""
    if status is None:
        return {"broker": False, "simulated": False, "kernels": [], "devices": []}
    return {
        "broker": True,
        "simulated": status.simulated,
        "kernels": [_fields_of(lease, _KERNEL_FIELDS) for lease in status.leases if lease.kernel_id in kernel_ids],
        "devices": [_fields_of(device, _DEVICE_FIELDS) for device in status.devices],
    }


def _fields_of(message: LeaseStatus | DeviceStatus, fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in fields}
