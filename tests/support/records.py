"""Records of leases, for tests that care about a few fields."""

from dataclasses import fields, replace
from typing import Any

from msgspec import structs

from fractional_gpu.broker.kernels.connection import is_command
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.ledger.records import Launch, LeaseRecord
from fractional_gpu.protocol.status import KernelFacts

_OF_LAUNCH = {one.name for one in fields(Launch)}
_SPEC = LeaseSpec(lease_id="a", pool="default", owner="ada", fraction_milli=250, reserve_mib=100)
_RECORD = LeaseRecord(
    spec=_SPEC, state=LeaseState.RESIDENT, generation=1, device_ids=(), saved_mib=0, uid=1000, token_sha256="", connection="",
    created_ms=1, launch=Launch(language="python"), facts=KernelFacts(kernel_id="k"), identity=None,
)  # fmt: skip


def changed(record: LeaseRecord, **given: Any) -> LeaseRecord:  # noqa: ANN401 - the fields' own types
    """Return the record with these fields of it or of its launch; `device_id` and `boot_id`, `pid`, `start_time` as their words say."""
    if "device_id" in given:
        device_id = given.pop("device_id")
        given.setdefault("device_ids", () if device_id is None else (device_id,))
    if "pid" in given:
        identity = [given.pop(name, None) for name in ("boot_id", "pid", "start_time")]
        given["identity"] = None if identity[1] is None else ProcessIdentity(*identity)
    state = given.get("state", record.state)
    launch = {name: given.pop(name) for name in list(given) if name in _OF_LAUNCH}
    facts = {name: given.pop(name) for name in list(given) if name in KernelFacts.__struct_fields__}
    given.setdefault("facts", structs.replace(record.facts, **facts))
    made = replace(record, **given)
    had_process = made.identity is not None or state is not LeaseState.UNATTACHED
    command, served = is_command(made.connection)
    launch = {"had_process": had_process, "command": command, "served": served, **launch}
    return replace(made, launch=replace(record.launch, **launch))


def a_record(**given: Any) -> LeaseRecord:  # noqa: ANN401 - as above
    """Return the record of a lease of which nothing is on a device, with these fields."""
    return changed(_RECORD, **given)
