"""Completion of `%gpu` and `%%gpu`: commands, options and values, from the table of commands.

Values that only the broker knows (the fractions and the pools on offer) are read once a minute at most, with a short timeout: a
completion that blocks is worse than one with the usual proposals.
"""

import os
import re
import time
from typing import NamedTuple

from fractional_gpu.core.units import format_fraction, format_memory
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import HostStatus
from fractional_gpu_kernel.magics.arguments import (
    BURST,
    COMMANDS,
    FRACTIONS,
    Argument,
    Command,
)
from fractional_gpu_kernel.memory.limits import DEVICE
from fractional_gpu_kernel.settings import Settings

__all__ = ["Completer", "Completions"]

_LINE = re.compile(r"\s*(%%?)gpu\s(.*)", re.DOTALL)
_TIMEOUT_S = 0.3
_KEEP_S = 60.0


class Completions(NamedTuple):
    """What is proposed for the `fragment` before the cursor."""

    fragment: str
    texts: list[str]


class Completer:
    """Proposes for one kernel."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._host: HostStatus | None = None
        self._read_s = -_KEEP_S

    def complete(self, line: str) -> Completions | None:
        """Return what may stand at the end of `line`, the text of its line up to the cursor; None: not ours."""
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        *words, fragment = match[2].split(" ")
        words = [word for word in words if word]
        if match[1] == "%%":
            command = BURST
        elif not words:
            return Completions(fragment, [name for name in COMMANDS if name.startswith(fragment)])
        else:
            command = COMMANDS.get(words.pop(0), Command("", ""))
        return Completions(
            fragment, [text for text in self._proposals(command, words, fragment) if text.startswith(fragment)]
        )

    def _proposals(self, command: Command, words: list[str], fragment: str) -> list[str]:
        options = {argument.name: argument for argument in command.arguments if argument.is_option}
        if words and words[-1] in options and not options[words[-1]].is_flag:
            return self._values(options[words[-1]])
        names = [name for name in options if name not in words]
        if fragment.startswith("-"):
            return [*names, "--help"]
        given = _positionals(words, options)
        places = [argument for argument in command.arguments if not argument.is_option]
        return (self._values(places[given]) if given < len(places) else []) + names

    def _values(self, argument: Argument) -> list[str]:
        match argument.kind:
            case "command":
                return list(COMMANDS)
            case "fraction":
                return self._fractions()
            case "memory":
                return _sizes()
            case "pool":
                return self._pools()
        return list(argument.values)

    def _fractions(self) -> list[str]:
        host = self._status()
        pool = self._own_pool(host)
        milli = host.pools.get(pool, []) if host is not None else []
        return [format_fraction(each) for each in milli] or list(FRACTIONS)

    def _pools(self) -> list[str]:
        return [name for name in [self._own_pool(self._status())] if name]

    def _own_pool(self, host: HostStatus | None) -> str:
        leases = host.leases if host is not None else []
        return next((lease.pool for lease in leases if lease.lease_id == self._settings.lease_id), "")

    def _status(self) -> HostStatus | None:
        now_s = time.monotonic()
        if now_s - self._read_s >= _KEEP_S:
            self._read_s = now_s
            try:
                with self._settings.connect(_TIMEOUT_S) as client:
                    self._host = client.status()
            except FractionalGPUError:
                self._host = None
        return self._host


def _positionals(words: list[str], options: dict[str, Argument]) -> int:
    """Return how many of the words are no options and no option's values."""
    count = 0
    value_follows = False
    for word in words:
        if value_follows:
            value_follows = False
        elif word.startswith("-"):
            value_follows = word in options and not options[word].is_flag
        else:
            count += 1
    return count


def _sizes() -> list[str]:
    """Return shares of the device's memory, whose size came with the last grant."""
    device = os.environ.get(DEVICE, "")
    device_mib = int(device) if device.isascii() and device.isdigit() else 81920
    return [format_memory(device_mib // part).replace(" ", "") for part in (8, 4, 2, 1)]
