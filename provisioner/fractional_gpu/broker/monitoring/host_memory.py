"""Protects saved state while host memory is short: leases resume early if devices have room, and the out-of-memory killer spares kernels.

State saved from a device is kept in the memory of the kernel's own process, so it counts towards the memory use of the machine and of every
control group above that process. The broker gives the arbiter two things: the budget for all saved state, which drops below what is already
saved if the machine runs short, and the suspended leases whose control groups are short of memory. The more memory a group has left, the
less often it is checked.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from fractional_gpu.broker.clock import within
from fractional_gpu.core.model import LeaseState
from fractional_gpu.host.files import replace_file
from fractional_gpu.host.memory import LEAST, LimitReader, adjustment, lower, put_back, smallest_limit, system_headroom
from fractional_gpu.host.process import ProcessIdentity, identify, is_alive, scan

if TYPE_CHECKING:
    from fractional_gpu.broker.broker import Broker

KEPT_FREE_PARTS: Final = 50  # 2 % of the machine's memory is kept free in addition to the headroom
_KEPT_FREE_LEAST_MIB: Final = 256
# Roughly the most room of their control group that processes fill within a second. One thread fills one or two GiB.
_FILLED_MIB_S: Final = 8192.0
_LONGEST_S: Final = 10.0  # the longest time between two reads of a group


def host_budget_mib(configured_mib: int, total_mib: int, saved_mib: int) -> int:
    """Return the MiB of host memory that saved state may use: the configured budget, or less if the machine needs the memory.

    If this is below `saved_mib`, some kernels should return to their devices.
    """
    kept_free_mib = max(_KEPT_FREE_LEAST_MIB, total_mib // KEPT_FREE_PARTS)
    return max(0, min(configured_mib, saved_mib + system_headroom().mib - kept_free_mib))


class HostMemoryPressure:
    """Finds leases whose own control groups have no memory left."""

    def __init__(self) -> None:
        self._rooms: dict[str, tuple[int, float]] = {}  # by lease: its pid, and when to read its room again

    def __call__(self, pids: Mapping[str, int], now_s: float) -> set[str]:
        """Return the leases that are short of memory, or an empty set if the whole machine is short of memory.

        `pids` maps lease ids to pids. Raises OSError or ValueError.
        """
        if not pids or system_headroom().mib == 0:
            return set()
        self._rooms = {
            lease_id: known
            for lease_id, known in self._rooms.items()
            if pids.get(lease_id) == known[0] and now_s < known[1]
        }
        reader = LimitReader()  # most kernels share a control group, which is read only once
        pressed = set()
        for lease_id, pid in pids.items():
            if lease_id in self._rooms:
                continue
            try:
                left_mib = reader.headroom(pid).mib
            except (OSError, ValueError):
                continue  # it ended, or its groups are unreadable: suspends refuse then, but this is no pressure
            if left_mib == 0:
                pressed.add(lease_id)
            self._rooms[lease_id] = pid, now_s + min(_LONGEST_S, left_mib / _FILLED_MIB_S)
        return pressed


# Keeps the out-of-memory killer from choosing a kernel because its saved state makes it look like the largest process.
#
# - While a lease has saved state, the `oom_score_adj` of its processes is lowered by that state's share of the memory that fills up first
#   (its smallest control group, or the machine). Their other memory still counts.
# - This requires root with CAP_SYS_RESOURCE. Other brokers can only undo an earlier raise of the kernels' adjustment.
# - The old value is first written to a file, so that the next broker can restore it if this one dies.
# - The old value is restored once the state is on a device again. New processes of the kernel inherit the lowered value. So that no user
#   can collect protected processes, theirs is reset, too, every half minute and at the end. Only values below 0 are reset, which users
#   cannot set themselves, and never the values of root's processes, whose services have such values.


log = logging.getLogger(__name__)

_OWN_ADJUSTMENT: Final = -500
_OWN_NICENESS: Final = -10  # users' computations share the processor time that the broker leaves
"""Values for the broker and its worker. If memory runs out, Linux kills them after users' processes and before vital services."""
_SWEEP_S: Final = 30.0
_SHORTEST_S: Final = 0.05
_SAVED: Final = frozenset({LeaseState.SUSPENDING, LeaseState.SUSPENDED, LeaseState.RESUMING, LeaseState.QUARANTINED})

Wanted = Mapping[str, tuple[int, Mapping[ProcessIdentity, int]]]
"""Maps a lease to its user and to the MiB saved by each of its processes."""


@dataclass(frozen=True, slots=True)
class LoweredProcess:
    """A process whose out-of-memory adjustment was lowered from `was` to each of `given` in turn.

    `since` is when it was first lowered, in clock ticks since boot.
    """

    identity: ProcessIdentity
    lease_id: str
    uid: int
    was: int
    saved_mib: int
    given: tuple[int, ...]
    since: int

    @property
    def is_inherited_visibly(self) -> bool:
        """Whether a newer process with one of the values in `given` must have inherited it, because its user cannot set such values."""
        return self.uid != 0 and any(value < 0 for value in self.given)


class OomProtection:
    def __init__(self, broker: "Broker", record: Path) -> None:
        self._broker = broker
        self._record = record
        self._lowered: dict[ProcessIdentity, LoweredProcess] = {}
        self._not_permitted: set[ProcessIdentity] = set()  # processes whose adjustment the broker may not lower
        self._reported = False
        self._swept_s = -math.inf

    async def run(self) -> None:
        """Keep the adjustments low for processes with saved state. On cancellation, leave them low, because kernels outlive the broker."""
        self._read()
        seen = -1
        while True:
            anything_changed = self._broker.anything_changed
            if self._broker.changes != seen or self._is_due():
                seen = self._broker.changes
                await self.apply()
            await within(_SWEEP_S, anything_changed)
            await asyncio.sleep(_SHORTEST_S)

    async def apply(self) -> None:
        try:
            await asyncio.to_thread(self._apply, self._wanted())
        except (OSError, ValueError) as error:
            log.warning("cannot update OOM score adjustments: %s", error)

    def _wanted(self) -> Wanted:
        found = {}
        for kernel, view in self._broker.views():
            if view.state in _SAVED and kernel.identity is not None:
                # An earlier broker's suspend left only the total, and a new suspend has only the measured use.
                rest = {kernel.identity: max(view.saved_mib, view.used_mib)}
                found[kernel.lease_id] = kernel.uid, dict(kernel.checkpoint.sizes) or rest
        return found

    def _apply(self, wanted: Wanted) -> None:
        over = [one for one in self._lowered.values() if one.lease_id not in wanted]
        if over or self._is_due():
            self._sweep()
        for one in over:
            with suppress(ProcessLookupError):
                put_back(one.identity, one.was)
            if self._lowered.pop(one.identity, None) is not None:
                self._write(self._lowered)
        self._not_permitted &= {identity for _, processes in wanted.values() for identity in processes}
        for lease_id, (uid, processes) in wanted.items():
            for identity, saved_mib in processes.items():
                with suppress(ProcessLookupError, PermissionError):  # it ended, or the broker's user may not touch it
                    self._protect(lease_id, uid, identity, saved_mib)

    def _is_due(self) -> bool:
        return time.monotonic() - self._swept_s >= _SWEEP_S

    def _protect(self, lease_id: str, uid: int, identity: ProcessIdentity, saved_mib: int) -> None:
        before = self._lowered.get(identity)
        if identity in self._not_permitted or (before is not None and before.saved_mib == saved_mib):
            return
        was = adjustment(identity.pid) if before is None else before.was
        target = max(LEAST, was - math.ceil(1000 * saved_mib / max(1, smallest_limit(identity.pid).mib)))
        if target >= was:
            return
        # Time since boot, in the unit of the processes' start times.
        ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        since, given = (ticks, ()) if before is None else (before.since, before.given)
        # Write the old value to disk before changing it, so that the next broker can restore it if this one is killed here.
        one = LoweredProcess(identity, lease_id, uid, was=was, saved_mib=saved_mib, given=(*given, target), since=since)
        self._write({**self._lowered, identity: one})
        if before is not None:
            put_back(identity, target)  # the target is lower than an earlier value
        now = lower(identity, target)
        if now > target and not self._reported:
            self._reported = True
            log.info(
                "this broker is not permitted to lower the OOM score adjustment of process %d from %d to below %d (it lacks "
                "CAP_SYS_RESOURCE): if memory runs out, Linux may end a suspended kernel because of the memory that it saved",
                *(identity.pid, was, now),
            )
        if now < was:
            self._lowered[identity] = replace(one, given=(*one.given, now))
        else:
            self._lowered.pop(identity, None)
            self._not_permitted.add(identity)
        self._write(self._lowered)

    def _sweep(self) -> None:
        self._swept_s = time.monotonic()
        # A child inherits its parent's adjustment when it is forked, so the killer would spare it, too.
        inherited = [one for one in self._lowered.values() if one.is_inherited_visibly]
        snapshot = scan() if inherited else None
        for one in inherited:
            for child in snapshot.started(one.uid, one.since) if snapshot is not None else ():
                if child not in self._lowered:
                    with suppress(ProcessLookupError):
                        if adjustment(child.pid) in one.given:
                            put_back(child, one.was)
        ended = [one for one in self._lowered.values() if not is_alive(one.identity)]
        for one in ended:
            del self._lowered[one.identity]
        if ended:
            self._write(self._lowered)

    def _write(self, lowered: Mapping[ProcessIdentity, LoweredProcess]) -> None:
        replace_file(self._record, msgspec.json.encode(list(lowered.values())))

    def _read(self) -> None:
        """Load the record of processes adjusted by an earlier broker. If it can't be read, ignore it: nothing can be undone without it."""
        try:
            found = msgspec.json.decode(self._record.read_bytes(), type=list[LoweredProcess])
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("cannot tell which OOM score adjustments an earlier broker changed: %s", error)
            return
        for one in found:
            with suppress(OSError):
                if is_alive(one.identity):
                    self._lowered[one.identity] = one


def protect_this_process() -> None:
    """Favour this process and its children over users' processes, as far as permitted, in scheduling and when memory runs out."""
    me = os.getpid()
    with suppress(PermissionError):  # a user's own broker is not permitted to
        os.setpriority(os.PRIO_PROCESS, me, min(_OWN_NICENESS, os.getpriority(os.PRIO_PROCESS, me)))
    try:
        if adjustment(me) > _OWN_ADJUSTMENT:
            log.info(
                "the broker and its worker have an OOM score adjustment of %d",
                lower(identify(me), _OWN_ADJUSTMENT),
            )
    except (OSError, ValueError) as error:
        log.warning("cannot set the broker's OOM score adjustment: %s", error)
