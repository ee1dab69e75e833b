"""An experiment: how fast can a process leave the device and come back with one pinned arena and the driver's virtual memory calls?

    python -P -m tests.gpu.offload_probe --sizes 8192 32768 --json offload.json

A plain driver process reserves addresses and maps device memory there. To leave, it copies everything into an arena of host memory that was
touched and registered before, by two streams, and unmaps and releases the device memory; another process saves the rest (its context) with
the driver's checkpoint. To come back, it is restored, maps fresh memory at the same addresses and copies back. Every byte is compared;
before it is released, device memory is overwritten, so stale memory cannot pass for copied. For comparison, the same run measures copies
between pinned memory and the device, and the driver's checkpoint of the same bytes.

Two rounds: the first with steps one by one, the second with the arena as it is and mapping overlapped with copying. Nothing of this is in
the product.
"""

import argparse
import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from tests.gpu.driver import Driver, Noise
from tests.gpu.holder_driver import location
from tests.gpu.items import Item, Note, NotHereError, Setting, cycle, main
from tests.gpu.look import host_memory, sees
from tests.gpu.talk import RefusedError, Talker, TalkError

__all__ = ["PAGES", "items"]

PAGES: Final = ("huge", "small", "hugetlb")  # madvise for huge pages, madvise against them, a memfd of huge pages
_SIZES: Final = "OFFLOAD_PROBE_SIZES_MIB"
_SIZES_MIB: Final = (8192, 32768)
_CHUNK_MIB: Final = 256
_COPY_MIB: Final = 1024
_HUGE: Final = 2 << 20
_GRAIN: Final = 64 << 20  # what a thread touches at a time
_POPULATE_WRITE: Final = 23  # madvise, since Linux 5.14
_STREAMS: Final = 2
_START_S: Final = 60.0
_STEP_S: Final = 120.0


# ---- the process that leaves and comes back ----------------------------------------------------------------------------------


class Leaver:
    """Device memory at reserved addresses, and an arena of the same size. Each method's time is measured by `serve`."""

    def __init__(self, mib: int, chunk_mib: int) -> None:
        self._driver = Driver()
        self._driver.start()
        self._noise = Noise(self._driver)
        self._properties, self._access = location(self._driver)
        grain = int(self._driver.do("cuMemGetAllocationGranularity", self._properties, self._minimum()))
        self.size = mib << 20
        self._chunk = min(-(-(chunk_mib << 20) // grain) * grain, self.size)
        if self.size % grain:
            raise ValueError(f"the size must be a multiple of the device's granularity of {grain} bytes, got {mib} MiB")
        self._address = int(self._driver.do("cuMemAddressReserve", self.size, 0, 0, 0))
        self._handles: dict[int, Any] = {}  # by offset
        self._streams = [self._driver.do("cuStreamCreate", 0) for _ in range(_STREAMS)]
        self._arena = 0
        self._memory: mmap.mmap | None = None

    def _minimum(self) -> Any:  # noqa: ANN401 - a member of the bindings' enumeration
        return self._driver.cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM

    def _chunks(self) -> list[tuple[int, int]]:
        return [(start, min(self._chunk, self.size - start)) for start in range(0, self.size, self._chunk)]

    def address(self) -> dict[str, Any]:
        """Return where it is."""
        return {"address": self._address, "chunks": len(self._chunks())}

    def map(self) -> None:
        """Create device memory and map it at the reserved addresses."""
        for start, size in self._chunks():
            self._map_one(start, size)

    def still_reserved(self) -> dict[str, Any]:
        """Whether the addresses are still reserved; if a restore has lost them, reserve them again.

        Raises DriverError and RuntimeError if they cannot be reserved.
        """
        start, size = self._chunks()[0]
        handle = self._driver.do("cuMemCreate", size, self._properties, 0)
        result, name, _ = self._driver.answer("cuMemMap", self._address + start, size, 0, handle, 0)
        if result == 0:
            self._driver.do("cuMemUnmap", self._address + start, size)
        self._driver.do("cuMemRelease", handle)
        if result == 0:
            return {"reserved": True}
        again = int(self._driver.do("cuMemAddressReserve", self.size, 0, self._address, 0))
        if again != self._address:
            raise RuntimeError(f"mapping gave {name} ({result}), and the same addresses are not to be had again")
        return {"reserved": f"anew: mapping gave {name} ({result})"}

    def _map_one(self, start: int, size: int) -> None:
        handle = self._driver.do("cuMemCreate", size, self._properties, 0)
        self._handles[start] = handle
        self._driver.do("cuMemMap", self._address + start, size, 0, handle, 0)
        self._driver.do("cuMemSetAccess", self._address + start, size, [self._access], 1)

    def unmap(self) -> None:
        """Unmap and release all device memory; the addresses stay reserved."""
        for start, size in self._chunks():
            self._driver.do("cuMemUnmap", self._address + start, size)
            self._driver.do("cuMemRelease", self._handles.pop(start))

    def fill(self) -> None:
        """Write noise."""
        self._noise.fill(self._address, self.size)

    def scrub(self) -> None:
        """Overwrite the device memory."""
        self._driver.do("cuMemsetD8", self._address, 0, self.size)
        self._driver.do("cuCtxSynchronize")

    def check(self) -> dict[str, Any]:
        """Compare every byte."""
        return {"intact": self._noise.is_intact(self._address, self.size)}

    def reserve_arena(self, pages: str) -> None:
        """Reserve host memory of the same size. Raises OSError if there are no such pages."""
        if pages == "hugetlb":
            descriptor = os.memfd_create("arena", os.MFD_HUGETLB | os.MFD_HUGE_2MB)
            os.ftruncate(descriptor, -(-self.size // _HUGE) * _HUGE)
            self._memory = mmap.mmap(descriptor, 0)
            os.close(descriptor)
        else:
            # Private: shared anonymous memory has a separate switch for huge pages.
            self._memory = mmap.mmap(-1, self.size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
        begins = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._arena = -(-begins // _HUGE) * _HUGE

    def touch(self, threads: int) -> None:
        """Have the kernel give all of the arena its pages, by several threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

        def touch_part(start: int) -> None:
            length = min(_GRAIN, self.size - start)
            if libc.madvise(self._arena + start, length, _POPULATE_WRITE) != 0:
                ctypes.memset(self._arena + start, 0, length)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(touch_part, range(0, self.size, _GRAIN)))

    def register(self) -> None:
        """Pin the arena for the device."""
        self._driver.do("cuMemHostRegister", self._arena, self.size, 0)

    def unregister(self) -> None:
        """Undo `register`."""
        self._driver.do("cuMemHostUnregister", self._arena)

    def copy_out(self) -> None:
        """Copy everything into the arena, the streams in turns."""
        for number, (start, size) in enumerate(self._chunks()):
            stream = self._streams[number % _STREAMS]
            self._driver.do("cuMemcpyDtoHAsync", self._arena + start, self._address + start, size, stream)
        self._synchronize()

    def copy_back(self) -> None:
        """Copy everything back, the streams in turns."""
        for number, (start, size) in enumerate(self._chunks()):
            self._copy_one_back(number, start, size)
        self._synchronize()

    def map_and_copy_back(self) -> None:
        """Map chunk by chunk while those before are copied."""
        for number, (start, size) in enumerate(self._chunks()):
            self._map_one(start, size)
            self._copy_one_back(number, start, size)
        self._synchronize()

    def _copy_one_back(self, number: int, start: int, size: int) -> None:
        stream = self._streams[number % _STREAMS]
        self._driver.do("cuMemcpyHtoDAsync", self._address + start, self._arena + start, size, stream)

    def _synchronize(self) -> None:
        for stream in self._streams:
            self._driver.do("cuStreamSynchronize", stream)


def serve(mib: int, chunk_mib: int) -> int:
    """Be that process: one request a line, answered with its seconds, until standard input ends."""
    try:
        leaver = Leaver(mib, chunk_mib)
    except (RuntimeError, ImportError, ValueError) as error:
        _say({"error": f"{type(error).__name__}: {error}"})
        return 1
    _say(leaver.address())
    for line in sys.stdin:
        request = json.loads(line)
        act: Callable[..., dict[str, Any] | None] = getattr(leaver, request.pop("do"))
        begun = time.perf_counter()
        try:
            answer = act(**request) or {}
        except (RuntimeError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say({**answer, "seconds": time.perf_counter() - begun})
    return 0


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


# ---- the experiment ----------------------------------------------------------------------------------------------------------


def items(sizes_mib: tuple[int, ...]) -> dict[str, Item]:
    """Return the experiment's items, by size: the driver's own way, and the arena's with each kind of pages."""
    made: dict[str, Item] = {}
    for mib in sizes_mib:
        made[f"native-{mib}"] = Item(act=partial(native, mib=mib), longest_s=150, needs=("driver",))
        for pages in PAGES:
            act = partial(offload, mib=mib, pages=pages)
            made[f"offload-{mib}-{pages}"] = Item(act=act, longest_s=150, needs=("driver",))
    return made


def native(setting: Setting, note: Note, mib: int) -> None:
    """Pinned copies, and the driver's own checkpoint and restore of so much."""
    _room(setting, mib)
    with setting.hold() as holder, setting.caller() as caller:
        copy_mib = min(_COPY_MIB, mib)
        seconds = holder.ask(_START_S, do="copy", mib=copy_mib)
        note("pinned copies", {name.removesuffix("_s"): _row(copy_mib, value) for name, value in seconds.items()})
        holder.ask(_STEP_S, do="hold", mib=mib, cached_mib=0)
        answers = cycle(caller, holder.pid, within_s=_STEP_S)
        note("steps", {name: _row(mib, one["seconds"]) for name, one in answers.items()})
        note("results", {name: one["result"] for name, one in answers.items()})
        note("intact", holder.ask(_STEP_S, do="check")["intact"])


def offload(setting: Setting, note: Note, mib: int, pages: str) -> None:
    """Two rounds with the arena registered throughout; if the driver cannot save that, registered again in each."""
    _room(setting, mib)
    if not _rounds(setting, note, mib, pages, keep_registered=True):
        _rounds(setting, note, mib, pages, keep_registered=False)


def _rounds(setting: Setting, note: Note, mib: int, pages: str, *, keep_registered: bool) -> bool:
    """Return False if the driver refused to save the process with its arena registered."""
    threads = min(16, os.cpu_count() or 1)
    command = ("-m", "tests.gpu.offload_probe", "--serve", str(mib), "--chunk", str(min(_CHUNK_MIB, max(1, mib // 4))))
    title = "" if keep_registered else "registered anew: "
    empty_mib = sees(setting.backend)["used_mib"]
    with Talker(command) as leaver, setting.caller() as caller:
        note(f"{title}addresses", leaver.listen(_START_S, "starting"))
        for step in ("map", "fill"):
            leaver.ask(_STEP_S, do=step)
        try:
            steps = {"reserve_arena": leaver.ask(_STEP_S, do="reserve_arena", pages=pages)["seconds"]}
        except RefusedError as error:
            raise NotHereError(f"no arena of these pages: {error}") from error
        steps["touch"] = leaver.ask(_STEP_S, do="touch", threads=threads)["seconds"]
        steps["register"] = leaver.ask(_STEP_S, do="register")["seconds"]
        note(f"{title}arena", {"threads": threads, **{name: _row(mib, value) for name, value in steps.items()}})
        note(f"{title}host_mib", host_memory(leaver.pid))
        for number in (1, 2):
            row = _one_round(setting, leaver, caller, mib, pipelined=number == 2, keep_registered=keep_registered)
            row["device_mib"]["before"] = empty_mib
            note(f"{title}round {number}", row)
            if row.get("intact") is False:
                raise RuntimeError(f"round {number} came back changed")
            if "refused" in row:
                return False
    return True


def _one_round(
    setting: Setting, leaver: Talker, caller: Talker, mib: int, *, pipelined: bool, keep_registered: bool
) -> dict[str, Any]:
    """Return the round's steps. `refused` names the one at which it ended, with its answer, if it did not get to the end."""
    seconds: dict[str, float] = {}
    row: dict[str, Any] = {"device_mib": {}}

    def do(step: str, process: Talker = leaver, **request: object) -> dict[str, Any]:
        try:
            answer = process.ask(_STEP_S, **(request or {"do": step}))
        except TalkError as error:
            row["refused"] = {step: str(error)}
            raise
        seconds[step] = answer["seconds"]
        return answer

    try:
        do("copy_out")
        leaver.ask(_STEP_S, do="scrub")
        do("unmap")
        if not keep_registered:
            do("unregister")
        row["device_mib"]["unmapped"] = sees(setting.backend)["used_mib"]
        for call in ("lock", "checkpoint", "restore", "unlock"):
            answer = do(call, caller, call=call, pid=leaver.pid)
            if answer["result"] != 0:
                row["refused"] = {call: answer}
                caller.ask(_STEP_S, call="unlock", pid=leaver.pid)
                return row
            if call == "checkpoint":
                row["device_mib"]["saved"] = sees(setting.backend)["used_mib"]
        row["reserved"] = leaver.ask(_STEP_S, do="still_reserved")["reserved"]
        if not keep_registered:
            do("register")
        for step in ("map_and_copy_back",) if pipelined else ("map", "copy_back"):
            do(step)
        row["intact"] = leaver.ask(_STEP_S, do="check")["intact"]
    except TalkError as error:
        row.setdefault("refused", {"a step without a time": str(error)})
    out = [step for step in seconds if step in ("copy_out", "unmap", "unregister", "lock", "checkpoint")]
    back = [step for step in seconds if step not in out]
    row["steps"] = {name: _row(mib, value) for name, value in seconds.items()}
    row["out"], row["back"] = (_row(mib, sum(seconds[step] for step in steps)) for steps in (out, back))
    return row


def _room(setting: Setting, mib: int) -> None:
    """Raise NotHereError where the device or the host has no room for so much."""
    seen = sees(setting.backend)
    if seen["free_mib"] < mib + 1024 and seen["total_mib"] > 4096:
        raise NotHereError(f"{mib} MiB and a context do not fit on the device, {seen['free_mib']} MiB are free")
    from fractional_gpu.host.memory import LimitReader  # noqa: PLC0415 - only this needs the project

    room = LimitReader().headroom(os.getpid())
    if room.mib < mib + 1024:
        raise NotHereError(f"{mib} MiB do not fit in host memory ({room.mib} MiB left, by {room.limited_by})")


def _row(mib: int, seconds: float) -> dict[str, float]:
    speed = round(mib * (1 << 20) / 1e9 / seconds, 2) if seconds > 0 else 0.0
    return {"seconds": round(seconds, 4), "gb_per_s": speed}


def _command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MIB")
    parser.add_argument("--serve", type=int, metavar="MIB", help=argparse.SUPPRESS)
    parser.add_argument("--chunk", type=int, default=_CHUNK_MIB, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(arguments)
    if options.serve:
        return serve(options.serve, options.chunk)
    if options.sizes:
        os.environ[_SIZES] = " ".join(map(str, options.sizes))  # for the items' processes
    named = os.environ.get(_SIZES, "")
    sizes = tuple(int(size) for size in named.split()) or _SIZES_MIB
    return main("tests.gpu.offload_probe", items(sizes), rest)


if __name__ == "__main__":
    raise SystemExit(_command(sys.argv[1:]))
