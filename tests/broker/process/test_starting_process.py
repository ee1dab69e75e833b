"""A process that has just started is trusted although /proc does not show its new environment yet."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fractional_gpu.broker.kernels import request_validation
from fractional_gpu.host.process import environment_value

NAME = "JUPYTER_GPU_LEASE"


@contextmanager
def about_to_become(lease_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that gets the lease's id by an exec, once it reads a line."""
    argv = ["sh", "-c", f"read go; exec env {NAME}={lease_id} cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env={"PATH": os.environ["PATH"]}) as process:
        yield process


async def test_the_new_environment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str | None] = []
    with about_to_become("mine") as process:

        def look(pid: int, name: str) -> str | None:
            value = environment_value(pid, name)
            looks.append(value)
            if len(looks) == 1:  # only now does it continue
                assert process.stdin is not None
                process.stdin.write(b"go\n")
                process.stdin.flush()
            return value

        monkeypatch.setattr(request_validation, "environment_value", look)
        assert await request_validation._environment_soon(process.pid, NAME, "mine") == "mine"
    assert looks[0] is None
