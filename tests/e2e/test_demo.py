"""All of `jupyter gpu demo` against a real broker: what it promises, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fractional_gpu.broker.process.driver_start import simulated_folder
from tests.support.paths import PYTHONPATH
from tests.support.world import until

DEADLINE_S = 240.0


class Demo:
    def __init__(self, temporary: Path, *arguments: str) -> None:
        self.temporary = temporary
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "demo", *arguments],
            env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        self.folders: set[Path] = set()

    def until_it_says(self, text: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            self.folders.update(self.temporary.glob("jupyter-gpu-demo-*"))
            if text in line:
                return
        raise AssertionError(f"{text!r} was not said in:\n{''.join(self.said)}")

    def end(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        self.said.append(err)
        return self.process.returncode, out

    def check_that_nothing_is_left(self) -> None:
        assert self.folders, "it had a folder"
        assert list(self.temporary.glob("jupyter-gpu-demo-*")) == []
        for folder in self.folders:
            assert not simulated_folder(str(folder / "broker.sock")).exists()
            until(partial(nobody_names, folder), f"no process names {folder}", deadline_s=30.0)


def nobody_names(folder: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        if os.fsencode(folder) + b"/" in told:
            return False
    return True


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def ended() -> Iterator[list[Demo]]:
    demos: list[Demo] = []
    yield demos
    for demo in demos:
        if demo.process.poll() is None:
            demo.process.kill()
        demo.process.wait()


def test_the_demonstration_keeps_its_promise_and_leaves_nothing(temporary: Path, ended: list[Demo]) -> None:
    demo = Demo(temporary, "--check", "--json", "--simulate", "1x112MiB")
    ended.append(demo)
    demo.until_it_says("tenant-b: cell 7 of 7")
    code, out = demo.end()
    assert code == 0, "".join(demo.said)
    result = json.loads(out)
    assert result["device"] == {"name": "Simulated GPU 112 MiB", "simulated": True, "memory_mib": 112}
    assert [kernel["kernelspec"] for kernel in result["kernels"]] == ["fractional-gpu-default-750"] * 2
    for kernel in result["kernels"]:
        assert kernel["fraction_milli"] == 750
        assert kernel["suspends"] >= 3
        assert kernel["resumes"] >= 3
        assert kernel["state_intact"] is True
    assert result["ok"] is True
    told = "".join(demo.said)
    assert "no process" not in told, "it does not report how its kernels end"
    assert "under examination" not in told
    demo.check_that_nothing_is_left()


def test_ended_half_way_it_leaves_nothing_either(temporary: Path, ended: list[Demo]) -> None:
    demo = Demo(temporary, "--check", "--simulate", "1x112MiB")
    ended.append(demo)
    demo.until_it_says("tenant-b: starting its kernel")
    demo.process.send_signal(signal.SIGTERM)
    code, out = demo.end()
    assert (code, out) == (130, "")
    assert "Traceback" not in "".join(demo.said)
    demo.check_that_nothing_is_left()
