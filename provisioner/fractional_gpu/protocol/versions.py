"""The versions of both sides: the header `X-Jupyter-GPU-Version` of each request and reply (`0.3.1; protocol=1`), and msgspec.

Rules:

- The protocol's number changes only when the two sides cannot understand each other at all: then the broker answers nothing but
  `ping`, and both sides say so. What is only added (routes, fields with defaults, verbs) leaves the number as it is.
- Within one number a client leaves out every field that has its default, so an older broker understands whatever it knows. The
  default of a field that was released never changes.
- A missing or unreadable header counts as our protocol: the header explains errors and gives no rights.
- Each side needs msgspec, which defines the messages. A kernel runs in an environment of its own, which may have none, or an old one.
"""

import re
import sys
from typing import NamedTuple

from fractional_gpu import __version__
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.limits import PROTOCOL_VERSION

__all__ = ["LOWEST_MSGSPEC", "OWN", "Version", "check_msgspec", "hint", "msgspec_problem", "refusal"]

LOWEST_MSGSPEC = "0.19"  # as in pyproject.toml

_HEADER = re.compile(r"([0-9A-Za-z.+!_-]{1,40}); protocol=([0-9]{1,6})", re.ASCII)
_RESTARTS = {
    "broker": "update jupyter-fractional-gpu where the broker is installed and restart the broker (kernels live on)",
    "client": "update jupyter-fractional-gpu in this environment and restart what runs there (the kernel or the server)",
}


class Version(NamedTuple):
    """A release of this project and the number of the protocol that it speaks."""

    release: str
    protocol: int

    def to_header(self) -> str:
        """Return the header's value."""
        return f"{self.release}; protocol={self.protocol}"

    @staticmethod
    def from_header(value: str | None) -> "Version | None":
        """Return the version in a header's value; None without the header, and for an unreadable one."""
        found = _HEADER.fullmatch(value or "")
        return Version(found[1], int(found[2])) if found is not None else None


OWN = Version(__version__, PROTOCOL_VERSION)


def refusal(*, client: Version, broker: Version) -> str:
    """Return why the two cannot work together and what to do, or "" if they can."""
    if client.protocol == broker.protocol:
        return ""
    older = "broker" if broker.protocol < client.protocol else "client"
    return (
        f"the GPU broker (version {broker.release}) speaks protocol {broker.protocol} and its client (version {client.release}) "
        f"protocol {client.protocol}, so they do not understand each other: {_RESTARTS[older]}"
    )


def hint(*, client: Version, broker: Version | None) -> str:
    """Return what to add to an error that different versions may have caused, or ""."""
    if broker is None or broker.release == client.release:
        return ""
    return (
        f" (the GPU broker is version {broker.release} and its client version {client.release}: what one of them has the other may "
        "not have yet; install the same version on both sides and restart the older one)"
    )


def msgspec_problem(version: str | None, *, python: str = sys.executable) -> str:
    """Return why an environment with this version of msgspec (None: without it) cannot call the broker, and what to do; or ""."""
    if version is not None and _release(version) >= _release(LOWEST_MSGSPEC):
        return ""
    found = "no msgspec that can be imported" if version is None else f"msgspec {version}"
    return (
        f"{python} has {found}, and jupyter-fractional-gpu needs version {LOWEST_MSGSPEC} or newer there: run "
        f"`{python} -m pip install 'msgspec>={LOWEST_MSGSPEC}'` and restart the kernel"
    )


def check_msgspec() -> None:
    """Raise BrokerUnavailableError, with the reason "no-msgspec", where this process cannot import msgspec, or only an old one."""
    try:
        import msgspec  # noqa: PLC0415 - what is checked

        version: str | None = msgspec.__version__
    except (ImportError, AttributeError):
        version = None
    if problem := msgspec_problem(version):
        raise BrokerUnavailableError(problem, reason="no-msgspec")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])
