"""The server's one subscription to the broker, and the events that browsers get of it.

It has a thread of its own: the client is synchronous, and the server's loop must not wait.

The stream's first line is the whole host's status; each later line holds what has changed, and the client decodes no more than that
(`BrokerClient.events`). A broker of an earlier version sends whole statuses.
"""

import logging
import threading
from collections.abc import Callable, Container, Mapping
from typing import Any

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import unstarted_broker
from fractional_gpu.client.seat import own_seat
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import DeviceStatus, HostStatus, LeaseStatus

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # nothing signals that a broker has started; a try is one attempt to open a socket
_CLOSE_AGAIN_S = 0.1


class StatusFollower:
    """Calls `on_status(status)` after each change, and `on_status(None)` when the broker is gone; from its thread."""

    def __init__(self, on_status: Callable[[HostStatus | None], None]) -> None:
        self._on_status = on_status
        self._stopping = threading.Event()
        self._client: BrokerClient | None = None
        self._thread = threading.Thread(target=self._run, name="gpu-status", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Close the connection and return when the thread has ended: no call comes after that."""
        self._stopping.set()
        while self._thread.is_alive():
            if self._client is not None:
                self._client.close()  # repeatedly: the thread may be about to connect, which one `close` does not find
            self._thread.join(_CLOSE_AGAIN_S)

    def _run(self) -> None:
        complaint = ""
        while not self._stopping.is_set():
            try:
                self._follow()
                complaint = ""
            except FractionalGPUError as error:
                if error.reason != "no-broker" and str(error) != complaint:
                    complaint = str(error)
                    log.info("GPU status: %s", error)
            self._stopping.wait(_RETRY_S)

    def _follow(self) -> None:
        """Follow until the broker goes away. Raises FractionalGPUError."""
        seat = own_seat()
        self._client = unstarted_broker(token=None if seat is None else seat.token)
        is_connected = False
        try:
            for status in self._client.events():
                if self._stopping.is_set():
                    break
                is_connected = True
                self._on_status(status)
        finally:
            self._client.close()
            if is_connected and not self._stopping.is_set():
                self._on_status(None)


# -- browser events ----------------------------------------------------------------------------------------------------
# The events that browsers get, as plain data: pure functions of the broker's messages.
#
# The server's event logger checks each event against its schema. Memory in MiB, fractions in milli-GPU, durations in milliseconds.


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
