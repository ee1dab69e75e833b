"""Small processes as forks of one that has imported what they need: imports take most of their start.

`Forked` starts one from the tests' process. This file, run as a script, is the process that forks.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tests.support.paths import PYTHONPATH


class Forked:
    """A process that calls a function (`module:name`) with its arguments, and exits with what it returns. As a subprocess.Popen."""

    def __init__(
        self,
        function: str,
        *arguments: str,
        imports: Sequence[str],
        stdin: int,
        stdout: int,
        environment: Mapping[str, str],
        uid: int | None = None,
    ) -> None:
        self._forker = _forker(environment.get("LD_LIBRARY_PATH", ""))
        asked = {
            "function": function,
            "arguments": arguments,
            "imports": imports,
            "environment": environment,
            "uid": uid,
        }
        self.pid = self._forker.ask(asked, stdin, stdout)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait_unreaped(self, timeout_s: float = 60) -> None:
        """Wait until it has ended. It stays a zombie."""
        descriptor = os.pidfd_open(self.pid)
        ended, _, _ = select.select([descriptor], [], [], timeout_s)
        os.close(descriptor)
        assert ended, f"process {self.pid} has not ended within {timeout_s} s"

    def wait(self, timeout_s: float = 60) -> int:
        if self.returncode is None:
            self.wait_unreaped(timeout_s)
            self.returncode = os.waitstatus_to_exitcode(self._forker.ask({"reap": self.pid}))
        return self.returncode


class _Forker:
    def __init__(self, library_path: str) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER_GPU_")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.gpu_sim.forked"],
            stdin=theirs.fileno(),
            env={**environment, "LD_LIBRARY_PATH": library_path, "PYTHONPATH": PYTHONPATH},
        )
        theirs.close()

    def ask(self, request: object, *descriptors: int) -> int:
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            return int(self._channel.recv(64))


_forker = cache(_Forker)
"""One for each LD_LIBRARY_PATH: it decides at a program's start where libraries are found."""


def _serve() -> int:
    """Fork as asked until the tests' process closes the channel; in each fork, return its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    while True:
        packet, descriptors, _, _ = socket.recv_fds(channel, 1 << 17, 2)
        if not packet:
            return 0
        request = json.loads(packet)
        if (pid := request.get("reap")) is not None:
            channel.send(str(os.waitpid(pid, 0)[1]).encode())
            continue
        module, _, name = request["function"].partition(":")
        for imported in (module, *request["imports"]):
            importlib.import_module(imported)
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(request, descriptors)
            return int(getattr(sys.modules[module], name)(request["arguments"]))
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(str(pid).encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    if (uid := request["uid"]) is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


if __name__ == "__main__":
    sys.exit(_serve())
