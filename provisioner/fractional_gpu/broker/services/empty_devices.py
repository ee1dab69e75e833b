"""Tells an administrator's program when a device has become empty, and when it is used again (`c.GPUBroker.on_empty`).

A device is empty when no lease and no other process has held anything on it for `empty_after`. The program is called with `empty` or `used`
and the device's UUID; an administrator may switch the device off with it, or give it back. Calls of one device never overlap and come in
order, and what happened meanwhile is told once. The broker waits for none of them: a device that is used is used at once, whatever the
program does. A call that takes longer than `_LONGEST_S` is ended. What it prints goes to the broker's log.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fractional_gpu.core.model import DeviceView

log = logging.getLogger(__name__)

_LONGEST_S = 30.0
_MOST_OUTPUT = 2000


@dataclass(slots=True)
class _Device:
    empty_since_s: float | None = None
    told_empty: bool = False
    call: asyncio.Task[None] | None = field(default=None, repr=False)


class EmptyDevices:
    """Watches the devices. `devices()` returns their views; `changed()` an event that is set when anything may have changed."""

    def __init__(
        self,
        program: Path,
        after_s: float,
        *,
        devices: Callable[[], Sequence[DeviceView]],
        changed: Callable[[], asyncio.Event],
        longest_s: float = _LONGEST_S,
    ) -> None:
        self._program = program
        self._after_s = after_s
        self._devices = devices
        self._changed = changed
        self._longest_s = longest_s
        self._known: dict[str, _Device] = {}

    async def run(self) -> None:
        """Watch until cancelled; a call that is under way then is ended."""
        try:
            while True:
                changed = self._changed()
                wait_s = self._look(time.monotonic())
                try:
                    async with asyncio.timeout(wait_s):
                        await changed.wait()
                except TimeoutError:
                    pass
        finally:
            calls = [device.call for device in self._known.values() if device.call is not None]
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _look(self, now_s: float) -> float | None:
        """Tell what is new; return for how long nothing will be, unless something changes."""
        waits = []
        for view in self._devices():
            known = self._known.setdefault(view.device_id, _Device())
            if view.reserved_mib or view.stranger_mib or view.lost:
                known.empty_since_s = None
            elif known.empty_since_s is None:
                known.empty_since_s = now_s
            if known.empty_since_s is not None and not known.told_empty:
                waits.append(known.empty_since_s + self._after_s - now_s)
            # `used` is told at once; `empty` after the time. While a call runs nothing is told: the next look tells what holds then.
            is_empty = known.empty_since_s is not None and now_s - known.empty_since_s >= self._after_s
            if is_empty != known.told_empty and known.call is None and (is_empty or known.empty_since_s is None):
                known.told_empty = is_empty
                known.call = asyncio.create_task(self._call(known, "empty" if is_empty else "used", view.device_id))
        due = [wait_s for wait_s in waits if wait_s > 0]
        return min(due, default=None)

    async def _call(self, known: _Device, word: str, device_id: str) -> None:
        """Run the program for one device."""
        await self._run_program(word, device_id)
        known.call = None
        self._look(time.monotonic())  # what happened meanwhile is told now

    async def _run_program(self, word: str, device_id: str) -> None:
        log.info("device %s is %s: calling %s", device_id, word, self._program)
        try:
            process = await asyncio.create_subprocess_exec(
                self._program,
                word,
                device_id,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no thread to watch it
            why = error.strerror if isinstance(error, OSError) else error
            log.warning("%s cannot be called for device %s: %s", self._program, device_id, why)
            return
        try:
            async with asyncio.timeout(self._longest_s):
                output, _ = await process.communicate()
        except TimeoutError:
            log.warning("%s %s %s took longer than %g s and is ended", self._program, word, device_id, self._longest_s)
            return
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own, with all that it started
                await process.wait()
        said = output.decode(errors="replace").strip()[:_MOST_OUTPUT]
        level = logging.INFO if process.returncode == 0 else logging.WARNING
        log.log(
            level,
            "%s %s %s ended with status %d%s",
            self._program,
            word,
            device_id,
            process.returncode,
            f": {said}" if said else "",
        )
