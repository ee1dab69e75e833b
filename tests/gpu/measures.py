"""What the product's constants should be, measured: python -P -m tests.gpu.measures --json measures.json

What a context costs by what was loaded into it, what each call of NVML takes, and how much free memory a restore needs beyond what was
saved. See tests/gpu/items.py for the rules.
"""

import importlib
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

from fractional_gpu.host.clock import since_boot_us
from tests.gpu.items import Item, Note, Setting, main
from tests.gpu.look import sees
from tests.gpu.talk import SilentError, Talker, TalkError

__all__ = ["ITEMS"]

_START_S: Final = 30.0
_ANSWER_S: Final = 60.0
_NVML_TIMES: Final = 30
_WORK_MS, _AFTER_S, _LOOK_S = 3000, 20.0, 0.5  # how long the work takes, how long to look after it, and how often
_LOWEST_MIB: Final = -128  # free beyond what was saved: a restore surely fails there
_HIGHEST_MIB: Final = 512  # and surely succeeds there
_CLOSE_MIB: Final = 8


def context_with_torch(setting: Setting, note: Note) -> None:
    """What a context costs in a torch process, as libraries load their modules into it."""
    before = sees(setting.backend)["used_mib"]
    with setting.hold("torch") as holder:
        for stage in ("zeros", "cublas", "cudnn", "compiled"):
            try:
                reserved = holder.ask(_ANSWER_S, do="stage", name=stage)["reserved_mib"]
            except SilentError as error:
                note(stage, str(error))
                return
            except TalkError as error:
                note(stage, str(error)[:400])
                continue
            seen = sees(setting.backend, holder.pid)
            listed = seen["listed"][str(holder.pid)]
            counted = listed["mib"] if listed else None
            row = {
                "reserved_mib": reserved,
                "listed_less_reserved_mib": None if counted is None else round(counted - reserved, 1),
                "device_less_reserved_mib": round(seen["used_mib"] - before - reserved, 1),
            }
            note(stage, row)


# ---- the margin of a restore -------------------------------------------------------------------------------------------------


def margin(setting: Setting, note: Note) -> None:
    """By bisection: how much must be free beyond what the process held? Each try ends its process, for out of memory is fatal."""
    low, high, tries = _LOWEST_MIB, _HIGHEST_MIB, 9
    with setting.hold() as filler, setting.caller() as caller:
        filler.ask(_START_S, do="hold", mib=1, cached_mib=0)
        for held_mib in sorted({4 * setting.small_mib, max(4 * setting.small_mib, setting.large_mib)}):
            rows: list[dict[str, Any]] = []

            def restored(beyond_mib: float, held_mib: int = held_mib, rows: list[dict[str, Any]] = rows) -> bool | None:
                rows.append(_restore_with(setting, caller, filler, held_mib, beyond_mib))
                note(f"tries at {held_mib} MiB", rows)
                return None if "result" not in rows[-1] else bool(rows[-1]["result"] == 0)

            found = _bisect(restored, low, high, tries)
            note(f"margin at {held_mib} MiB", found)
            if "fits_mib" not in found:
                return
            low, high, tries = int(found["fits_mib"]) - 64, int(found["fits_mib"]) + 192, 6


def _bisect(fits: Callable[[float], bool | None], low: float, high: float, tries: int) -> dict[str, Any]:
    """Return the least that fits and the most that does not, MiB; `fits` gives None if nothing could be tried."""
    ends = {point: fits(point) for point in (high, low)}
    if ends[high] is not True:
        return {"why": f"not even {high} MiB beyond are enough" if ends[high] is False else "it could not be tried"}
    if ends[low] is True:
        return {"fits_mib": low, "why": "the lowest that was tried fits"}
    for _ in range(tries - len(ends)):
        if high - low <= _CLOSE_MIB:
            break
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return {"fits_mib": high, "fails_mib": low}


def _restore_with(setting: Setting, caller: Talker, filler: Talker, held_mib: int, beyond_mib: float) -> dict[str, Any]:
    row: dict[str, Any] = {"beyond_mib": beyond_mib}
    with setting.hold() as target:
        target.ask(_START_S, do="hold", mib=held_mib, cached_mib=0)
        resident_mib = sees(setting.backend)["used_mib"]
        for call in ("lock", "checkpoint"):
            answer = caller.ask(_ANSWER_S, call=call, pid=target.pid)
            if answer["result"] != 0:
                return {**row, "refused": {call: answer}}
        needed_mib = resident_mib - sees(setting.backend)["used_mib"]
        try:
            filled = filler.ask(_ANSWER_S, do="fill_up", leave_mib=max(0, needed_mib + beyond_mib))
            row |= {"needed_mib": round(needed_mib, 1), "really_beyond_mib": round(filled["free_mib"] - needed_mib, 1)}
            answer = caller.ask(_ANSWER_S, call="restore", pid=target.pid)
            row |= {"result": answer["result"], "seconds": answer["seconds"]}
            row["state"] = caller.ask(_ANSWER_S, call="state", pid=target.pid)["value"]
            row["unlock"] = caller.ask(_ANSWER_S, call="unlock", pid=target.pid)["result"]
        finally:
            filler.ask(_ANSWER_S, do="release")
        if answer["result"] == 0:
            row["intact"] = target.ask(_ANSWER_S, do="check")["intact"]
    return row


# ---- NVML --------------------------------------------------------------------------------------------------------------------


class _Timed:
    """A module of functions that notes how long each call of one takes."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - pynvml has no types
        self._module = module
        self.times: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as above
        found = getattr(self._module, name)
        if not name.startswith("nvml") or not callable(found) or isinstance(found, type):
            return found

        def timed(*arguments: object, **options: object) -> object:
            begun = time.perf_counter()
            try:
                return found(*arguments, **options)
            finally:
                self.times.setdefault(name, []).append(time.perf_counter() - begun)

        return timed


def nvml_times(setting: Setting, note: Note) -> None:
    """What each call of NVML takes that the broker makes, by the product's own monitor, with a process on the device."""
    from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor  # noqa: PLC0415 - only this needs the project

    timed = _Timed(importlib.import_module("pynvml"))
    with setting.hold() as holder:
        holder.ask(_START_S, do="hold", mib=setting.small_mib, cached_mib=0)
        with closing(NvidiaMonitor(nvml=timed)) as monitor:  # type: ignore[arg-type]
            device = min(monitor.devices(), key=lambda one: one.index).device_id
            reads: dict[str, Callable[[], object]] = {
                "devices": monitor.devices,
                "use": lambda: monitor.use(device),
                "activity": lambda: monitor.activity(device, since_boot_us() - 2_000_000),
                "sensors": lambda: monitor.sensors(device),
            }
            for name, read in reads.items():
                seconds = []
                for _ in range(_NVML_TIMES):
                    begun = time.perf_counter()
                    read()
                    seconds.append(time.perf_counter() - begun)
                note(name, _milliseconds(seconds))
    note("calls", {name: _milliseconds(seconds) for name, seconds in sorted(timed.times.items())})


def samples_after_work(setting: Setting, note: Note) -> None:
    """What NVML reports of a process's work in the seconds after it ended: the stamps of samples, relative to that end, and their rates."""
    from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor  # noqa: PLC0415 - only this needs the project

    nvml = importlib.import_module("pynvml")
    with setting.hold() as holder, closing(NvidiaMonitor()) as monitor:
        device = min(monitor.devices(), key=lambda one: one.index).device_id
        handle = nvml.nvmlDeviceGetHandleByUUID(device)
        holder.ask(_START_S, do="hold", mib=setting.small_mib, cached_mib=0)
        begun_us = time.time_ns() // 1000
        holder.ask(_START_S, do="spin", ms=_WORK_MS)
        holder.ask(_ANSWER_S, do="check")
        end_us, end_boot_us = time.time_ns() // 1000, since_boot_us()
        note("worked_s", round((end_us - begun_us) / 1e6, 2))
        rows = []
        while (after_s := (time.time_ns() // 1000 - end_us) / 1e6) < _AFTER_S:
            row: dict[str, object] = {"after_s": round(after_s, 2)}
            since = {"since its end": end_us, "since 2 s ago": end_us + int((after_s - 2) * 1e6), "all": 0}
            for name, since_us in since.items():
                try:
                    found = nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
                except nvml.NVMLError as error:
                    row[name] = str(error)
                    continue
                row[name] = [[round((one.timeStamp - end_us) / 1e6, 2), one.smUtil, one.memUtil] for one in found]
            row["device_percent"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            seen = monitor.activity(device, end_boot_us)
            if seen is not None:
                row["worked_until_s"] = [round((at_us - end_boot_us) / 1e6, 2) for at_us in seen.worked_us.values()]
            rows.append(row)
            note("then", rows)
            time.sleep(_LOOK_S)


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {"median_ms": round(statistics.median(seconds) * 1e3, 3), "worst_ms": round(max(seconds) * 1e3, 3)}


ITEMS: Final = {
    "context-torch": Item(act=context_with_torch, longest_s=150, needs=("driver", "torch")),
    "samples-after-work": Item(act=samples_after_work, longest_s=60, needs=("driver",)),
    "nvml-times": Item(act=nvml_times, longest_s=60, needs=("driver",)),
    "margin": Item(act=margin, longest_s=120),
}


if __name__ == "__main__":
    raise SystemExit(main("tests.gpu.measures", ITEMS))
