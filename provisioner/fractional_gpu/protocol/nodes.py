"""A host's capacity, as reported by the broker and published by the node agent.

The agent publishes it in Slurm's `Extra` field or in an annotation on a Kubernetes node. This summary contains no user names, because
everyone with read access to nodes can see it, including administrators and hubs' spawn pages. It is JSON in printable ASCII without spaces,
`=`, apostrophes or backticks, so that `scontrol` treats it as one word. It is at most `MAX_SUMMARY` bytes long. Readers check every field,
since programs other than the agent might have written it.
"""

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, structs

from fractional_gpu.protocol.limits import MAX_NAME

MAX_SUMMARY: Final = 4096  # bytes
STALE_S: Final = 900
"""The age at which a summary counts as stale, in seconds. Agents renew it several times within that period."""
_LARGEST = 10**9
_Number = Annotated[int, Meta(ge=0, le=_LARGEST)]
_Name = Annotated[str, Meta(max_length=MAX_NAME)]
_OUTSIDE_WORDS = re.compile(r"[^!-~]|[='`]")


class PoolShares(Struct, frozen=True, kw_only=True):
    """The total, held and available shares of a pool, in milli-GPU (thousandths of a device)."""

    name: _Name
    total_milli: _Number  # 1000 for each device of the pool
    held_milli: _Number  # by seats, and by leases without a seat
    # How much more can be granted, in any of the fractions on offer, while the forecast wait stays within `wait_bound`.
    admissible_milli: _Number
    waiting: _Number = 0  # number of leases in the queue for a device
    fraction_milli: _Number = 0  # the default fraction on offer; waits are forecast for a seat of this size
    fractions_milli: Annotated[
        list[_Number], Meta(max_length=32)
    ] = []  # the fractions on offer, or empty for any fraction
    device_mib: _Number = 0  # memory of the pool's smallest device that leases may have


class PoolSummary(PoolShares, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of a node's pools, as published by the agent."""

    devices: _Number
    wait_p50_ms: _Number = 0  # forecast for the cells of one more seat: half of the cells wait at most this long ...
    wait_p95_ms: _Number = 0  # ... and 95 of 100 cells at most this long
    count: _Name = ""  # the engine's name for thousandths of a device: `jgpu:open` in Slurm (`--gres=jgpu:open:250`)


class NodeSummary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The total, held and available capacity of a node. Memory is in MiB."""

    at_s: Annotated[int, Meta(ge=0, le=60 * _LARGEST)]  # when these figures were true, in seconds since 1970
    simulated: bool = False
    memory_left_mib: _Number = 0  # host memory left for saved state
    pools: Annotated[list[PoolSummary], Meta(max_length=32)] = []
    left_out: _Number = 0  # number of pools left out for lack of room
    problem: Annotated[str, Meta(max_length=1000)] = ""  # why it takes no more jobs, or ""

    def is_stale(self, now_s: int) -> bool:
        """Return whether the summary is too old to rely on."""
        return now_s - self.at_s > STALE_S


def encode_summary(summary: NodeSummary) -> str:
    """Return the summary as text. If the text would be longer than `MAX_SUMMARY`, leave out as many pools as necessary, from the end."""
    while True:
        text = _OUTSIDE_WORDS.sub(_escaped, msgspec.json.encode(summary).decode())
        if len(text) <= MAX_SUMMARY:
            return text
        if not summary.pools:
            summary = structs.replace(summary, problem="see the log of the node's agent")
            continue
        summary = structs.replace(summary, pools=summary.pools[:-1], left_out=summary.left_out + 1)


def parse_summary(text: str) -> NodeSummary:
    """Parse a summary. Raises ValueError with a message that says what is wrong."""
    if len(text.encode(errors="replace")) > MAX_SUMMARY:
        raise ValueError(
            f"the node's summary is longer than {MAX_SUMMARY} bytes, which is more than a node agent writes"
        )
    try:
        summary = msgspec.json.decode(text, type=NodeSummary)
    except (msgspec.DecodeError, UnicodeDecodeError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(
            f"this summary does not come from a node agent of this release: {error}; install the same release on the nodes and here"
        ) from None
    for words in (summary.problem, *(pool.name for pool in summary.pools), *(pool.count for pool in summary.pools)):
        if not words.isprintable():
            raise ValueError(f"the summary contains {words[:80]!a}; it must contain only printable characters")
    return summary


def _escaped(found: re.Match[str]) -> str:
    """Return the JSON escape for a character not allowed in a summary. In compact JSON, these characters can occur only inside strings."""
    code = ord(found[0])
    if code > 0xFFFF:
        code -= 0x10000
        return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
    return f"\\u{code:04x}"


class PoolCapacity(PoolShares, frozen=True, kw_only=True):
    """One of a host's pools, as reported by the broker."""

    devices: list[str]  # UUIDs, without devices that are lost or being emptied
    wait_p50_s: float  # forecast for the cells of one more seat: half of the cells wait at most this long ...
    wait_p95_s: float  # ... and 95 of 100 cells at most this long
    wait_target_ms: int  # a cell that waits longer than this waits too long ...
    wait_bound_milli: int  # ... and this many of a thousand cells may


class Capacity(Struct, frozen=True, kw_only=True):
    """The remaining capacity of a host. Memory is in MiB."""

    version: str
    simulated: bool
    host_memory_total_mib: int  # the machine's memory
    host_memory_left_mib: int  # left for saved state
    pools: list[PoolCapacity] = []
