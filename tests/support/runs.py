"""`jupyter gpu run` in a world, and the programs that it runs in tests: one that answers lines, and one that answers connections."""

import socket
import subprocess
import sys
import time
from typing import IO, Self

from fractional_gpu.protocol.messages import PinRequest
from fractional_gpu.protocol.status import LeaseStatus
from tests.support.stories import fill
from tests.support.world import DEADLINE_S, World, until

__all__ = ["READER", "SERVER", "Run", "intact"]

_INTACT = 'print("intact" if hashlib.sha256(buffer.read()).hexdigest() == digest else "lost", flush=True)\n'
READER = f"""
import sys
{fill(1)}
print("ready", flush=True)
for line in sys.stdin:
    {_INTACT}
"""
"""Has bytes on the device, and for each line of its input looks whether they are all there."""
SERVER = f"""
import socketserver, sys
{fill(2)}
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(b"intact\\n" if hashlib.sha256(buffer.read()).hexdigest() == digest else b"lost\\n")
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
print("ready", flush=True)
server.serve_forever()
"""
"""The same for each line that it gets on a connection."""


class Run:
    """One `jupyter gpu run` in a separate process, with pipes."""

    def __init__(self, world: World, name: str, *words: str) -> None:
        """Start it; `words` are its options and, after `--`, the command."""
        self.world = world
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fractional_gpu.commands.main", "run", "--name", name, *words],
            env=world.environment,
            cwd=world.notebooks,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    @classmethod
    def python(cls, world: World, name: str, program: str, *words: str, options: tuple[str, ...] = ()) -> Self:
        """Run a Python program and return when it reports that it is ready."""
        run = cls(world, name, "--fraction", "3/4", *options, "--", sys.executable, "-c", program, *words)
        assert run.line() == "ready\n", run.end()
        run.lease()  # the broker sees at once that it uses the device
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.process.pid, self.pid_of_command()):
            if pid is not None:
                World.end(pid, 9)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def line(self) -> str:
        return _some(self.process.stdout).readline()

    def ask(self) -> str:
        _some(self.process.stdin).write("look\n")
        return self.line()

    def end(self) -> tuple[int, str]:
        """The exit status and standard error, once it has ended."""
        _some(self.process.stdin).close()
        return self.process.wait(DEADLINE_S), _some(self.process.stderr).read()

    def pin(self) -> None:
        lease = self.lease()
        assert lease is not None
        with self.world.client() as client:
            client.pin(lease.lease_id, PinRequest(duration_ms=60_000))

    def lease(self) -> LeaseStatus | None:
        with self.world.client() as client:  # fresh: the broker looks at the devices at once, not with its next sample
            leases = client.status(fresh=True).leases
        return next((lease for lease in leases if lease.spec.label == self.name), None)

    def pid_of_command(self) -> int | None:
        """The command's process, None if the broker follows none."""
        lease = self.lease() if self.world.broker_pid() is not None else None
        return lease.pid if lease is not None else None

    def await_state(self, state: str) -> LeaseStatus:
        def ask() -> LeaseStatus | None:
            lease = self.lease()
            return lease if lease is not None and lease.state == state else None

        return until(ask, f"{self.name} becomes {state}")

    def await_no_lease(self) -> None:
        until(lambda: self.lease() is None, f"the lease of {self.name} ends")


def _some(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def intact(port: int) -> tuple[str, float]:
    """What a SERVER answers to the first line of a new connection, and how long that took, seconds."""
    begun_s = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as line:
        line.sendall(b"look\n")
        with line.makefile("r") as answers:
            return answers.readline(), time.perf_counter() - begun_s
