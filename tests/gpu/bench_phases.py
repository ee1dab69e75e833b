"""Suspend and resume of one process at growing sizes, split by the driver's phases, next to pinned copies measured in the same run.

The checkpoint worker is driven directly, so that the times have only the driver's calls. What a size needs and the machine does not
have is reported in its row instead of a time.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from fractional_gpu.gpu.interface import DeviceInfo, Monitor
from fractional_gpu.gpu.open import open_monitor
from fractional_gpu.gpu.simulated.host import create, destroy
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.claims import DeviceClaim
from fractional_gpu.host.memory import LimitReader
from fractional_gpu.host.process import ProcessIdentity, identify
from tests.gpu.look import host_memory
from tests.support.paths import PYTHONPATH, ROOT

__all__ = ["PHASES", "measure_phases"]

PHASES: Final = ("lock", "checkpoint", "restore", "unlock")
_MIB: Final = 1 << 20
_CONTEXT_MIB: Final = (
    1024  # of device memory, at most, next to what is held; and the largest part that a check needs twice
)
_HOST_MARGIN_MIB: Final = 2048
_MOST_CACHED_MIB: Final = 8192
_OFTEN_MIB: Final = 8192  # above it one sample is a minute's work and tells enough
_MOVE_S: Final = 300.0
_COPY_MIB: Final = 1024  # at most, and no more than the largest size that is measured
_SIMULATED: Final = "1x512MiB"
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ROOT: Final = str(ROOT)


def measure_phases(
    sizes_mib: Sequence[int],
    *,
    times: int,
    holder: str,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
    small_pages: bool = False,
) -> dict[str, Any]:
    """Return the copies' speeds and a row for each size, with and without shrinking. Sizes in MiB, times in seconds.

    `holder`: the kind of tests/gpu/holder.py; one without a caching allocator has nothing to shrink. `small_pages`: the kernel gives the
    process no huge pages. `keep` is given what there is so far after each size: the largest takes minutes, and may be the one at which
    the run is stopped.
    """
    with _backend(simulated=holder == "simulated") as (backend, monitor):
        device = min(monitor.devices(), key=lambda one: one.index)
        with DeviceClaim.claim(device.device_id):
            before_mib = monitor.use(device.device_id).used_mib
            bench = _Bench(
                backend=backend,
                monitor=monitor,
                device=device,
                before_mib=before_mib,
                holder=holder,
                small_pages=small_pages,
                thp=_THP.read_text().strip() if _THP.is_file() else "none",
            )
            return asyncio.run(_measure(bench, sizes_mib, times, say, keep))


@contextmanager
def _backend(*, simulated: bool) -> Iterator[tuple[str, Monitor]]:
    with ExitStack() as stack:
        name = "nvidia"
        if simulated:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jgl-bench-")), "host")
            create(folder, _SIMULATED)
            stack.callback(destroy, folder)
            name = f"simulated:{folder}"
        yield name, stack.enter_context(closing(open_monitor(name)))


async def _measure(
    bench: "_Bench",
    sizes_mib: Sequence[int],
    times: int,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    async with _holder(bench) as holder, _worker(bench.backend) as worker:
        copy_mib = min(_COPY_MIB, bench.device.memory_mib // 8, max(sizes_mib))
        seconds = await holder.ask(do="copy", mib=copy_mib)
        speeds = {name.removesuffix("_s"): _speed(copy_mib, value) for name, value in seconds.items()}
        say(f"pinned copies: {speeds['to_device']:.1f} GB/s to the device, {speeds['to_host']:.1f} GB/s to the host")
        rows: list[dict[str, Any]] = []
        found = {
            "pinned_copies_gb_per_s": speeds,
            "holder": bench.holder,
            "small_pages": bench.small_pages,
            "thp": bench.thp,
            "sizes": rows,
        }
        for mib in sizes_mib:
            why_not = bench.why_not(holder.identity, mib)
            if why_not:
                rows.append({"held_mib": mib, "not_measured": why_not})
                say(f"{mib} MiB: not measured, {why_not}")
                continue
            for shrinking in (False,) if bench.holder == "driver" else (False, True):
                rows.append(await _size(bench, holder, worker, mib=mib, times=times, shrinking=shrinking))
                say(f"{mib} MiB: {json.dumps(rows[-1])}")
                keep(found)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """What is measured on. `before_mib`: what the device held before we came."""

    backend: str
    monitor: Monitor
    device: DeviceInfo
    before_mib: int
    holder: str
    small_pages: bool
    thp: str  # the kernel's setting of transparent huge pages

    def held_mib(self) -> int:
        """What we hold on the device: by the device's total, which is true in any process namespace."""
        return max(0, self.monitor.use(self.device.device_id).used_mib - self.before_mib)

    def why_not(self, identity: ProcessIdentity, mib: int) -> str:
        """Why this size cannot be measured here; empty if it can."""
        moved_mib = mib + _cached(mib)
        context_mib = 64 if self.device.simulated else _CONTEXT_MIB
        if moved_mib + 2 * context_mib > self.device.memory_mib - self.before_mib:
            return (
                f"{moved_mib} MiB and the context do not fit on the device "
                f"({self.device.memory_mib} MiB, others hold {self.before_mib})"
            )
        room = LimitReader().headroom(identity.pid)
        if moved_mib + _HOST_MARGIN_MIB > room.mib:
            return f"{moved_mib} MiB do not fit in host memory ({room.mib} MiB left, by {room.limited_by})"
        return ""


def _cached(mib: int) -> int:
    return min(mib // 2, _MOST_CACHED_MIB)


async def _size(
    bench: _Bench, holder: "_Holder", worker: WorkerLink, *, mib: int, times: int, shrinking: bool
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {name: [] for name in ("shrink", *PHASES)}
    moved: list[int] = []
    left: list[int] = []
    for _ in range(times if mib <= _OFTEN_MIB else 1):
        await holder.ask(do="hold", mib=mib, cached_mib=_cached(mib))
        samples["shrink"].append((await holder.ask(do="shrink"))["seconds"] if shrinking else 0.0)
        moved.append(bench.held_mib())
        samples["lock"].append(await worker.lock(holder.identity, 30_000) / 1e6)
        samples["checkpoint"].append(await worker.checkpoint(holder.identity, _MOVE_S) / 1e6)
        left.append(bench.held_mib())
        saved = host_memory(holder.identity.pid)
        samples["restore"].append(await worker.restore(holder.identity, None, _MOVE_S) / 1e6)
        samples["unlock"].append(await worker.unlock(holder.identity) / 1e6)
        if not (await holder.ask(do="check"))["intact"]:
            raise RuntimeError(f"{mib} MiB came back changed")
    row = _row(mib, shrinking=shrinking, moved_mib=int(median(moved)), samples=samples)
    return {**row, "left_mib": max(left), "host_while_saved_mib": saved}


def _row(mib: int, *, shrinking: bool, moved_mib: int, samples: dict[str, list[float]]) -> dict[str, Any]:
    seconds = {name: median(values) for name, values in samples.items()}
    suspend_s = seconds["shrink"] + seconds["lock"] + seconds["checkpoint"]
    resume_s = seconds["restore"] + seconds["unlock"]
    return {
        "held_mib": mib,
        "moved_mib": moved_mib,
        "shrinking": shrinking,
        "samples": len(samples["lock"]),
        "phases_s": {name: round(value, 4) for name, value in seconds.items()},
        "suspend_s": round(suspend_s, 4),
        "resume_s": round(resume_s, 4),
        "suspend_gb_per_s": _speed(moved_mib, suspend_s),
        "resume_gb_per_s": _speed(moved_mib, resume_s),
    }


def _speed(mib: int, seconds: float) -> float:
    return round(mib * _MIB / 1e9 / seconds, 2)


class _Holder:
    """The other end of tests/gpu/holder.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.identity = identify(process.pid)

    async def ask(self, **request: object) -> dict[str, Any]:
        """Return the answer. Raises RuntimeError if the process ended instead."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the holder has no pipes")
        process.stdin.write(json.dumps(request).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that holds memory ended at {request}; its complaint is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the process that holds memory failed at {request}: {answer['error']}")
        return answer


@asynccontextmanager
async def _holder(bench: _Bench) -> AsyncIterator[_Holder]:
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        **bench.monitor.kernel_environment(bench.device.device_id),
        "PYTHONPATH": os.pathsep.join([PYTHONPATH, *([inherited] if inherited else [])]),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "tests.gpu.holder", bench.holder, *(["--small-pages"] if bench.small_pages else [])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        yield _Holder(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def _worker(backend: str) -> AsyncIterator[WorkerLink]:
    worker = WorkerLink(backend)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.close()
