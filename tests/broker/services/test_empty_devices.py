"""An administrator's program is told of empty devices: once, in order, and nothing waits for it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.broker.services.empty_devices import EmptyDevices
from fractional_gpu.core.model import DeviceView
from tests.gpu_sim.test_worker_link import fails_once

DEADLINE_S = 30.0
EMPTY = DeviceView(
    device_id="GPU-1",
    name="H200",
    pool="default",
    memory_mib=1000,
    leasable_mib=1000,
    reserved_mib=0,
    stranger_mib=0,
    over_committed=False,
    lost=False,
)


class Host:
    """Devices that become what the test says."""

    def __init__(self) -> None:
        self.views = [EMPTY]
        self.changed = asyncio.Event()

    def devices(self) -> Sequence[DeviceView]:
        return self.views

    def become(self, *, reserved_mib: int = 0, stranger_mib: int = 0, device_id: str = "GPU-1") -> None:
        view = replace(EMPTY, device_id=device_id, reserved_mib=reserved_mib, stranger_mib=stranger_mib)
        self.views = [one for one in self.views if one.device_id != device_id] + [view]
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def program(folder: Path, body: str = "") -> Path:
    """A program that writes down how it is called, and then does more."""
    path = folder / "tell"
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/told\n{body}\n')
    path.chmod(0o755)
    return path


def told(folder: Path) -> list[str]:
    path = folder / "told"
    return path.read_text().splitlines() if path.exists() else []


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again at what another process does: nothing signals that."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - as it says
            await asyncio.sleep(0.01)


async def until_told(folder: Path, *lines: str) -> None:
    await until(lambda: told(folder) == list(lines))


@asynccontextmanager
async def watching(path: Path, host: Host, *, after_s: float = 0.05, longest_s: float = 30.0) -> AsyncIterator[None]:
    watch = EmptyDevices(path, after_s, devices=host.devices, changed=lambda: host.changed, longest_s=longest_s)
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_device_is_told_as_empty_once_and_as_used_when_something_is_there_again(tmp_path: Path) -> None:
    host = Host()
    async with watching(program(tmp_path), host):
        await until_told(tmp_path, "empty GPU-1")
        host.become()
        host.become(reserved_mib=1)
        await until_told(tmp_path, "empty GPU-1", "used GPU-1")
        host.become(stranger_mib=1)
        host.become()
        await until_told(tmp_path, "empty GPU-1", "used GPU-1", "empty GPU-1")


async def test_a_device_that_is_used_before_its_time_is_not_told(tmp_path: Path) -> None:
    host = Host()
    host.become(device_id="GPU-2")
    async with watching(program(tmp_path), host, after_s=0.5):
        async with asyncio.timeout(DEADLINE_S):
            while not told(tmp_path):  # GPU-1 is used again and again, and GPU-2 is empty for all of its time
                host.become(reserved_mib=1)
                await asyncio.sleep(0.01)
                host.become()
                await asyncio.sleep(0.01)
        assert told(tmp_path) == ["empty GPU-2"]
        await until_told(tmp_path, "empty GPU-2", "empty GPU-1")


async def test_what_happens_during_a_call_is_told_after_it(tmp_path: Path) -> None:
    host = Host()
    go = tmp_path / "go"
    wait = f'if [ "$1 $2" = "empty GPU-1" ]; then while [ ! -e {go} ]; do sleep 0.01; done; fi'
    path = program(tmp_path, f"{wait}\necho ended $2 >> {tmp_path}/told")
    async with watching(path, host):
        await until_told(tmp_path, "empty GPU-1")
        host.become(reserved_mib=1)
        host.become(device_id="GPU-2")  # found in the same look as what GPU-1 has become
        await until_told(tmp_path, "empty GPU-1", "empty GPU-2", "ended GPU-2")
        go.touch()
        await until(lambda: len(told(tmp_path)) == 6)
    calls = [line for line in told(tmp_path) if line.endswith("GPU-1")]
    assert calls == ["empty GPU-1", "ended GPU-1", "used GPU-1", "ended GPU-1"], "calls of one device do not overlap"


async def test_a_program_that_hangs_is_ended_with_all_that_it_started_and_the_next_call_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host()
    path = program(tmp_path, 'if [ "$1" = empty ]; then sleep 3600; fi')
    with caplog.at_level(logging.WARNING):
        async with watching(path, host, longest_s=0.3):
            await until_told(tmp_path, "empty GPU-1")
            host.become(reserved_mib=1)
            await until_told(tmp_path, "empty GPU-1", "used GPU-1")
    assert "took longer than 0.3 s and is ended" in caplog.text


async def test_a_program_that_fails_or_is_not_there_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with watching(program(tmp_path, "echo no power switch; exit 3"), Host()):
            await until(lambda: "ended with status 3: no power switch" in caplog.text)
        async with watching(tmp_path / "nothing", Host()):
            await until(lambda: "cannot be called for device GPU-1: No such file or directory" in caplog.text)


async def test_a_program_that_no_thread_can_watch_is_called_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host()
    create = fails_once(RuntimeError("can't start new thread"), asyncio.create_subprocess_exec)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    with caplog.at_level(logging.WARNING):
        async with watching(program(tmp_path), host):
            await until(lambda: "cannot be called for device GPU-1: can't start new thread" in caplog.text)
            host.become(reserved_mib=1)
            await until_told(tmp_path, "used GPU-1")
