"""How long kernels take that start at the same time without a broker, compared with the same kernels of the local provisioner.

Each time is measured in a fresh program, so the first kernel starts the broker.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from jupyter_client.manager import AsyncKernelManager, KernelManager
from jupyter_core.utils import ensure_event_loop

from tests.benchmarks.kernels import PLAIN
from tests.benchmarks.report import Row
from tests.benchmarks.stats import median, median_estimate
from tests.support.world import World

__all__ = ["measure_crowds"]

_DEADLINE_S = 120
_CROWD = 10
_MOST_DEATHS = 3
_SEVERAL = {
    "first kernel, until its process runs": ("started", 1),
    "two kernels of a server that keeps some ready, until their processes run": ("started", 2),
    "ten kernels by asyncio.gather, until all answer": ("gathered", _CROWD),
    "ten kernels by threads, until all answer": ("threads", _CROWD),
}


def measure_crowds(world: World, kernelspec: str, times: int, say: Callable[[str], None]) -> list[Row]:
    """Start each kind in turns with plain kernels, in fresh programs and with a fresh broker."""
    rows = []
    for what, (how, number) in _SEVERAL.items():
        found: dict[str, list[float]] = {PLAIN: [], kernelspec: []}
        for turn in range(times):
            for name in (PLAIN, kernelspec) if turn % 2 else (kernelspec, PLAIN):
                found[name].append(_seconds(world, name, how, number))
            say(f"{what}: {found[kernelspec][-1]:.2f} s, plain {found[PLAIN][-1]:.2f} s")
        ours, theirs = found[kernelspec], found[PLAIN]
        rows.append(
            Row(
                measured=f"{what}, no broker before",
                compared_with="plain ipykernels",
                unit="s",
                ours=median(ours),
                theirs=median(theirs),
                compared=median_estimate([one - other for one, other in zip(ours, theirs, strict=True)]),
                quotient=False,
                samples=times,
            )
        )
    return rows


def _seconds(world: World, kernelspec: str, how: str, number: int) -> float:
    """Run the program until no kernel of it ends at its start: jupyter_client may choose a port that another program takes first."""
    argv = [sys.executable, "-m", "tests.benchmarks.crowding", kernelspec, how, str(number)]
    for left in reversed(range(_MOST_DEATHS)):
        if (pid := world.broker_pid()) is not None:
            world.end(pid, signal.SIGTERM)
        done = subprocess.run(
            argv, env=world.environment, capture_output=True, check=not left, text=True, timeout=_DEADLINE_S
        )
        if not done.returncode:
            break
    return float(json.loads(done.stdout))


async def _gathered(kernelspec: str, number: int, *, answer: bool) -> float:
    managers = [AsyncKernelManager(kernel_name=kernelspec) for _ in range(number)]

    async def start(manager: AsyncKernelManager) -> None:
        await manager.start_kernel()
        if answer:
            client = manager.client()
            client.start_channels()
            try:
                await client.wait_for_ready(timeout=_DEADLINE_S)
            finally:
                client.stop_channels()

    begun_s = time.perf_counter()
    try:
        await asyncio.gather(*(start(manager) for manager in managers))
        return time.perf_counter() - begun_s
    finally:
        await asyncio.gather(*(manager.shutdown_kernel(now=True) for manager in managers))


def _threads(kernelspec: str, number: int) -> float:
    def start(manager: KernelManager) -> None:
        try:
            manager.start_kernel()
            client = manager.blocking_client()
            client.start_channels()
            try:
                client.wait_for_ready(timeout=_DEADLINE_S)
            finally:
                client.stop_channels()
        finally:
            ensure_event_loop().close()

    managers = [KernelManager(kernel_name=kernelspec) for _ in range(number)]
    begun_s = time.perf_counter()
    try:
        with ThreadPoolExecutor(number) as threads:
            list(threads.map(start, managers))
        return time.perf_counter() - begun_s
    finally:
        for manager in managers:
            with suppress(RuntimeError):  # it was not started
                manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    _kernelspec, _how, _number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if _how == "threads":
        print(json.dumps(_threads(_kernelspec, _number)))
    else:
        print(json.dumps(asyncio.run(_gathered(_kernelspec, _number, answer=_how == "gathered"))))
