"""The `config` of a kernelspec's `kernel_provisioner` stanza, checked before anything is started.

jupyter_client passes the stanza to the provisioner's constructor and ignores misspelt keys. Here every key and value is checked; an
error is one sentence with the key, the value and what is allowed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from fractional_gpu.core.units import parse_fraction_milli, parse_memory_mib
from fractional_gpu.protocol.errors import BadRequestError

__all__ = ["CONFIG_KEYS", "KernelConfig", "check_pool_name", "parse_kernel_config"]

CONFIG_KEYS = ("pool", "fraction", "memory", "request", "devices", "priority", "simulate")
_SIMULATED = re.compile(r"(\d{1,4}x)?\d{1,9}[KMGT]i?B(,(\d{1,4}x)?\d{1,9}[KMGT]i?B){0,63}", re.ASCII | re.IGNORECASE)
_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_DEVICES = range(1, 9)
_PRIORITIES = range(-1000, 1001)
_SHOWN = 80  # characters of a bad value


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """A checked configuration. Fraction in milli-GPU; memory in MiB, None for the fraction's share of the device.

    `request_mib`: the guaranteed part of the memory in a pool that reserves by use, None for the fraction's share. `simulate`: the
    simulated devices of a broker that is started for the kernel; None: the machine's own devices.
    """

    pool: str
    fraction_milli: int
    memory_mib: int | None = None
    priority: int = 0
    request_mib: int | None = None
    devices: int = 1
    simulate: str | None = None


def check_pool_name(name: object) -> str:
    """Return the name of a pool, which is also part of a kernelspec's folder name. Raises BadRequestError."""
    if not isinstance(name, str) or not _POOL_NAME.fullmatch(name):
        raise BadRequestError(
            f"pool {_shown(name)} is not a pool's name; allowed: up to 63 letters, digits, dots, dashes and "
            "underscores, "
            "a letter or digit first"
        )
    return name


def parse_kernel_config(stanza: Mapping[str, object], *, default_pool: str, default_fraction: str) -> KernelConfig:
    """Check a stanza's config.

    Raises BadRequestError: one sentence with the key, what was given and what is allowed.
    """
    for key in stanza:
        if key not in CONFIG_KEYS:
            near = get_close_matches(str(key), CONFIG_KEYS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise BadRequestError(
                f"kernel_provisioner config has the unknown key {_shown(key)}; {hint}allowed: {', '.join(CONFIG_KEYS)}"
            )
    devices = _devices(stanza.get("devices", 1))
    try:
        whole = "1" if devices > 1 else default_fraction
        fraction_milli = parse_fraction_milli(_scalar(stanza.get("fraction", whole)))
        memory_mib, request_mib = (_memory(stanza, key) for key in ("memory", "request"))
    except ValueError as error:
        raise BadRequestError(f"kernel_provisioner config: {error}") from None
    if devices > 1 and fraction_milli != 1000:
        raise BadRequestError(
            f"kernel_provisioner config: fraction is {_shown(stanza['fraction'])} with {devices} devices; several devices are "
            "whole ones: leave fraction out, or use one device"
        )
    return KernelConfig(
        pool=check_pool_name(stanza.get("pool", default_pool)),
        fraction_milli=fraction_milli,
        memory_mib=memory_mib,
        priority=_priority(stanza.get("priority", 0)),
        simulate=_simulated(stanza.get("simulate")),
        request_mib=request_mib,
        devices=devices,
    )


def _memory(stanza: Mapping[str, object], key: str) -> int | None:
    return parse_memory_mib(_size(stanza[key])) if stanza.get(key) is not None else None


def _devices(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in _DEVICES:
        raise BadRequestError(
            f"kernel_provisioner config: devices is {_shown(value)}; allowed: a whole number from {_DEVICES.start} to "
            f"{_DEVICES.stop - 1}"
        )
    return value


def _simulated(value: object) -> str | None:
    if value is None or (isinstance(value, str) and _SIMULATED.fullmatch(value)):
        return value
    raise BadRequestError(
        f"kernel_provisioner config: simulate is {_shown(value)}; allowed: COUNTxMEMORY such as 2x80GiB or 2x80GiB,1x40GiB"
    )


def _priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in _PRIORITIES:
        raise BadRequestError(
            f"kernel_provisioner config: priority is {_shown(value)}; allowed: a whole number from "
            f"{_PRIORITIES.start} to {_PRIORITIES.stop - 1}, higher goes first"
        )
    return value


def _scalar(value: object) -> str | float:
    """Return text for any other type: the parser's error then names the value."""
    return value if isinstance(value, (str, int, float)) else repr(value)[:_SHOWN]


def _size(value: object) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        allowed = "allowed: a positive size such as 512MiB, 20GiB or 20GB"
        raise ValueError(f"memory {_shown(value)} is not a size; {allowed}")  # noqa: TRY004 - the parser's own error
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
