"""Statuses of leases as a broker tells them, for tests that care about a few fields."""

from dataclasses import fields, replace
from typing import Any

from msgspec import structs

from fractional_gpu.core.model import LeaseSpec, LeaseState, LeaseView, Span
from fractional_gpu.protocol.status import LeaseStatus

_NOW_MS = 10_000_000_000
_OF_SPEC = {one.name for one in fields(LeaseSpec)} - {"gated"}
_OF_LEASE = {one.name for one in fields(LeaseView)} - {"reason", "sentence", "busy"}
_SPEC = LeaseSpec(lease_id="lease-1", pool="default", owner="me", fraction_milli=250, reserve_mib=2048)
_LEASE = LeaseView(
    spec=_SPEC, state=LeaseState.RESIDENT, generation=1, device_id=None, saved_mib=0, used_mib=0, busy=False, since_ms=_NOW_MS,
    last_active_ms=_NOW_MS, operation_id=None, reason="", sentence="",
)  # fmt: skip
_STATUS = LeaseStatus(
    lease=_LEASE, now_ms=_NOW_MS, reason="", sentence="", kernel_id="", pid=None, device_name="", simulated=False, busy=False,
    gated=True,
)  # fmt: skip


def changed(status: LeaseStatus, **given: Any) -> LeaseStatus:  # noqa: ANN401 - the fields' own types
    """Return the status with these fields of it, of its lease or of the lease's spec; ages and spans of time are from now.

    A forecast is exact (`expected_ms`, `resume_ms`) but for its bounds (`expected_bounds_ms`, `resume_bounds_ms`).
    """
    now_ms = status.now_ms
    if "age_ms" in given:
        given["since_ms"] = now_ms - given.pop("age_ms")
    if "pinned_ms" in given:
        given["pinned_until_ms"] = now_ms + given.pop("pinned_ms")
    if "goes_away_in_ms" in given:
        given["deadline_ms"] = now_ms + given.pop("goes_away_in_ms")
    if "device_id" in given and "device_ids" not in given:
        given["device_ids"] = () if given["device_id"] is None else (given["device_id"],)
    for name, value in (("expected", status.expected), ("resume", status.lease.resume)):
        if f"{name}_ms" in given:
            given[name] = _exactly(given.pop(f"{name}_ms"))
        if (bounds := given.pop(f"{name}_bounds_ms", None)) is not None:
            span: Any = given.get(name, value)
            given[name] = replace(span, low_ms=bounds[0], high_ms=bounds[1])
    spec = replace(status.spec, **{name: given.pop(name) for name in list(given) if name in _OF_SPEC})
    lease = replace(status.lease, spec=spec, **{name: given.pop(name) for name in list(given) if name in _OF_LEASE})
    return structs.replace(status, lease=lease, **given)


def _exactly(ms: int) -> Span:
    return Span(expected_ms=ms, low_ms=ms, high_ms=ms)


def a_status(**given: Any) -> LeaseStatus:  # noqa: ANN401 - as above
    return changed(_STATUS, **given)
