"""Checks user-supplied names, describes states in words, and compares the versions of a client and the broker.

An administrator's program, such as a hub's service, names the administrator it is acting for in the header `X-Acting-For`. The header
grants no rights: the broker just records the name in the audit log. It rejects the header unless the sender is an administrator.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, unquote

from fractional_gpu import __version__
from fractional_gpu.protocol.errors import BadRequestError, BrokerUnavailableError
from fractional_gpu.protocol.limits import PROTOCOL_VERSION

if TYPE_CHECKING:  # messages need msgspec, and this module reports a missing msgspec
    from fractional_gpu.protocol.status import DeviceStatus, LeaseStatus

ACTING_FOR = "X-Acting-For"
MAX_ACTING_FOR = 255  # characters
CAUSE = "X-Cause"
SYSTEM_UNIT = "/etc/systemd/system/jupyter-gpu.service"


def describe_unprintable(name: str) -> str:
    """Describe the first character that could affect a display, such as `U+202E (right-to-left override)`. Return "" if there is none."""
    import unicodedata  # noqa: PLC0415 - kernels import this module but check no names

    for character in name:
        if not character.isprintable():
            known = unicodedata.name(character, "control character").lower()
            return f"U+{ord(character):04X} ({known})"
    return ""


def encode_acting_for(name: str) -> str:
    """Return the name as a header value in percent-encoded UTF-8, since HTTP headers are ASCII. Raises BadRequestError."""
    return quote(_check(name), safe="")


def decode_acting_for(values: Sequence[str]) -> str | None:
    """Return the name from the header's values, or None if there is no such header. Raises BadRequestError."""
    if not values:
        return None
    if len(values) > 1:
        raise BadRequestError(
            f"the header {ACTING_FOR} was sent {len(values)} times; send it once", reason="bad-acting-for"
        )
    try:
        name = unquote(values[0], errors="strict")
    except UnicodeDecodeError:
        raise BadRequestError(
            f"the header {ACTING_FOR} is not percent-encoded UTF-8; send the name as `urllib.parse.quote` writes it",
            reason="bad-acting-for",
        ) from None
    return _check(name)


def _check(name: str) -> str:
    """Return the name. Raises BadRequestError if it is blank, longer than 255 characters, or contains unprintable characters."""
    if not 0 < len(name) <= MAX_ACTING_FOR or not name.isprintable() or name.isspace():
        has = f", with {found}" if (found := describe_unprintable(name)) else ""
        raise BadRequestError(
            f"{ACTING_FOR} is {name[:80]!a} ({len(name)} characters{has}); expected a name of 1 to {MAX_ACTING_FOR} printable "
            "characters; an administrator must rename this user at the hub",
            reason="bad-acting-for",
        )
    return name


# The states of a lease in words, for the terminal, the notebook, the hub's page and the demonstration. JupyterLab's extension has the same
# words in `words.ts`, and a test compares the two.


class StateWords(NamedTuple):
    """The texts for a state: `words` for a column or a status line, and `meaning` as an explanation for the kernel's user."""

    words: str
    meaning: str


STATES: Final[Mapping[str, StateWords]] = {
    "unattached": StateWords("no process", "the broker does not know this kernel's process yet"),
    "unarmed": StateWords("has not used the GPU", "not on a GPU; the next cell waits for one if it has to"),
    "resident": StateWords("on the GPU", "on the GPU"),
    "suspending": StateWords("being suspended", "being saved to host memory"),
    "suspended": StateWords("suspended", "saved in host memory; the next cell brings it back"),
    "resuming": StateWords("being resumed", "on its way back to the GPU"),
    "quarantined": StateWords(
        "unknown, under examination",
        "unknown: the broker is examining the GPU, and will leave this kernel alone until it has finished",
    ),
    "ended": StateWords("ended", "ended; restart the kernel for a new share, which loses its variables"),
}


def state_words(state: str) -> str:
    """Describe the state in a few words. Return an unknown state unchanged."""
    return STATES[state].words if state in STATES else state


def state_meaning(state: str) -> str:
    """Explain the state to the kernel's user. Return an unknown state unchanged."""
    return STATES[state].meaning if state in STATES else state


def device_deadline(device: "DeviceStatus") -> str:
    """Say when a device will become unavailable and what will happen to its kernels. Return "" if it has no deadline or is already gone."""
    if not device.goes_away_in_ms:
        return ""
    found = [
        f"{count} {'kernel' if count == 1 else 'kernels'} on it {what}"
        for count, what in ((device.leases_saved, "will be saved before"), (device.leases_lost, "cannot be saved"))
        if count
    ]
    return f"goes away in {_duration(device.goes_away_in_ms)}" + (f": {', '.join(found)}" if found else "")


def gpu_deadline(lease: "LeaseStatus") -> str:
    """Say when a kernel's GPU will become unavailable and what will happen to the kernel's state. Return "" if the GPU has no deadline."""
    if lease.goes_away_in_ms is None:
        return ""
    when = f"its GPU goes away in {_duration(lease.goes_away_in_ms)}"
    if not lease.lease.lost_because:
        return f"{when}, and it is saved before"
    return f"{when}, and it cannot be saved before: {lease.lease.lost_because}; save your results to disk now"


def lease_deadline(lease: "LeaseStatus") -> str:
    """Say when a kernel's GPU and host will become unavailable. Return "" if neither has a deadline."""
    left_ms = lease.host_goes_away_in_ms
    parts = [gpu_deadline(lease), "" if left_ms is None else host_deadline(left_ms)]
    return "; ".join(part for part in parts if part)


def host_deadline(left_ms: int) -> str:
    """Say when the host will become unavailable and what the user should do."""
    left = f"goes away in {_duration(left_ms)}" if left_ms else "should have gone away by now"
    return f"its host {left}, with all of its memory: save to a disk that outlives it"


def _duration(ms: int) -> str:
    """Format a duration in words, rounded up to whole seconds."""
    from fractional_gpu.core.units import format_duration  # noqa: PLC0415 - kernels load this module at their start

    return format_duration(-(-ms // 1000) * 1000)


# Each request has the header `X-Jupyter-GPU-Version` (`0.3.1; protocol=1`). The protocol number changes only when the two sides cannot
# understand each other at all. In that case, the broker answers only `ping`. A missing header counts as our protocol, since the header
# explains errors and gives no rights.

VERSION = f"{__version__}; protocol={PROTOCOL_VERSION}"


def refusal(*, client: str = VERSION, broker: str = VERSION) -> str:
    """Explain why a client and a broker of these versions cannot work together, and what to do. Return "" if they can."""
    if client.partition("; protocol=")[2] == broker.partition("; protocol=")[2]:
        return ""
    return (
        f"the GPU broker has version {broker[:60]!a} and its client {client[:60]!a}, which are incompatible: install the "
        "same version of jupyter-fractional-gpu on both sides, and restart the older one (kernels outlive a restart of the broker)"
    )


# Both sides need msgspec, which defines the messages. The kernel's environment may lack it, or have an old version.
LOWEST_MSGSPEC = "0.19"  # as in pyproject.toml


def msgspec_problem(version: str | None, *, python: str = sys.executable) -> str:
    """Explain why this version of msgspec cannot be used to call the broker and what to do. Return "" if it can.

    `version` is None if msgspec is missing.
    """
    if version is not None and _release(version) >= _release(LOWEST_MSGSPEC):
        return ""
    found = "no msgspec that can be imported" if version is None else f"msgspec {version}"
    return (
        f"{python} has {found}, and jupyter-fractional-gpu needs version {LOWEST_MSGSPEC} or newer there: run "
        f"`{python} -m pip install 'msgspec>={LOWEST_MSGSPEC}'` and restart the kernel"
    )


def check_msgspec() -> None:
    """Raise BrokerUnavailableError ("no-msgspec") if this process cannot import msgspec, or if its version is too old."""
    try:
        import msgspec  # noqa: PLC0415 - to check it

        version: str | None = msgspec.__version__
    except (ImportError, AttributeError):
        version = None
    if problem := msgspec_problem(version):
        raise BrokerUnavailableError(problem, reason="no-msgspec")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])
