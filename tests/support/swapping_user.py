"""A user whose programs take turns on simulated devices, and who keeps calling the broker: the victim of other users' attacks.

    python -P swapping_user.py --socket PATH [--programs 2] [--threads 1]

It prints a line when its programs are there. `go` on the standard input has it begin, `stop` finish what it is at and print the figures
since then, one JSON object. A cell is what a notebook's is: the lease is acquired, for which another one may have to be suspended, and
every byte is looked at. What fails because the broker is away is tried again until it works; that is part of the time that it takes. Ends
with its standard input.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.gpu.simulated import cuda
from fractional_gpu.protocol.errors import BrokerUnavailableError, ConflictError, FractionalGPUError
from fractional_gpu.protocol.messages import COMMAND, AcquireRequest, AttachRequest, LeaseRequest, ProgressKind

_PING_PAUSE_S, _CELL_PAUSE_S, _RETRY_S = 0.02, 0.1, 0.05
_PATIENCE_S = 120.0
_MILLI, _MIB = 750, 16  # two do not fit on a device


def hold() -> None:
    """A program: it fills device memory after the first line, and checks it for each further one."""
    seed, environment = json.loads(sys.stdin.readline())
    os.environ.update(environment)
    data = random.Random(seed).randbytes(1 << 20) * _MIB
    buffer = cuda.allocate(len(data))
    buffer.write(data)
    digest = hashlib.sha256(data).hexdigest()
    del data
    print("intact", flush=True)  # noqa: T201 - as below
    for _ in sys.stdin:
        print("intact" if buffer.sha256() == digest else "wrong", flush=True)  # noqa: T201 - the protocol with its user
    os._exit(0)  # to free the memory would have to wait while it is suspended


class Program:
    """A program with a lease; `cell` is one use of the device."""

    def __init__(self, socket: str, number: int) -> None:
        with BrokerClient(socket, timeout_s=_PATIENCE_S) as broker:
            lease = broker.create_lease(LeaseRequest(fraction_milli=_MILLI, gated=False, kind=COMMAND))
        self._first: list[object] | None = [number]
        self.lease_id = lease.lease_id
        self.client = BrokerClient(socket, token=lease.token, timeout_s=_PATIENCE_S)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--hold"],
            env={**os.environ, **lease.environment, "JUPYTER_GPU_LEASE": self.lease_id},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        pid, boot_id = self._process.pid, Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        start_time = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        described = AttachRequest(
            pid=pid, start_time=start_time, boot_id=boot_id, connection={}, kind=COMMAND, served=True
        )
        self.client.attach(self.lease_id, described)

    def cell(self) -> bool:
        """Return whether the program lives and has every byte. Raises FractionalGPUError."""
        with closing(self.client.hold(self.lease_id, AcquireRequest())) as lines:
            for progress in lines:
                if progress.kind == ProgressKind.REFUSED:
                    raise ConflictError(progress.sentence, reason=progress.reason)
                if progress.kind == ProgressKind.GRANTED:
                    return self._look(progress.environment)
        raise BrokerUnavailableError("the stream ended before the grant")

    def _look(self, environment: dict[str, str]) -> bool:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        first, self._first = self._first, None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([*first, environment] if first else "look") + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline() == "intact\n"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with BrokerClient(self.client.socket_path, timeout_s=5.0) as broker, suppress(FractionalGPUError):
            broker.release(self.lease_id)


class User:
    """The programs, and the threads that use them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._socket: str = options.socket
        self._programs = [Program(options.socket, number) for number in range(options.programs)]
        self._going = threading.Event()
        self._ping_s: list[float] = []
        self._cell_s: list[float] = []
        self._failed, self._wrong = Counter[str](), 0
        self._threads = options.threads
        self._working: list[threading.Thread] = []
        for program in self._programs * 2:  # a device counts it as work for a while that the first use fills memory
            self._use(program)

    def go(self) -> None:
        self._ping_s, self._cell_s, self._failed = [], [], Counter()
        self._going.set()
        parts = [self._programs[number :: self._threads] for number in range(self._threads)]
        self._working = [
            threading.Thread(target=self._ping, daemon=True),
            *(threading.Thread(target=self._cells, args=(part,), daemon=True) for part in parts),
        ]
        for thread in self._working:
            thread.start()

    def stop(self) -> dict[str, object]:
        self._going.clear()
        for thread in self._working:
            thread.join()
        swaps = sum(program.client.lease(program.lease_id).suspends for program in self._programs)
        return {
            "ping_s": self._ping_s,
            "cell_s": self._cell_s,
            "failed": self._failed,
            "wrong": self._wrong,
            "swaps": swaps,
        }

    def close(self) -> None:
        self._going.clear()
        for program in self._programs:
            program.close()

    def _timed(self, act: Callable[[], object], seconds: list[float]) -> None:
        begun_s = time.perf_counter()
        while True:
            try:
                act()
                break
            except FractionalGPUError as error:
                self._failed[type(error).__name__] += 1
                time.sleep(_RETRY_S)
        seconds.append(time.perf_counter() - begun_s)

    def _ping(self) -> None:
        with BrokerClient(self._socket, timeout_s=_PATIENCE_S) as client:
            while self._going.is_set():
                self._timed(client.ping, self._ping_s)
                time.sleep(_PING_PAUSE_S)

    def _cells(self, programs: list[Program]) -> None:
        while True:
            for program in programs:
                if not self._going.is_set():
                    return
                self._timed(lambda program=program: self._use(program), self._cell_s)  # type: ignore[misc]
                time.sleep(_CELL_PAUSE_S)

    def _use(self, program: Program) -> None:
        if not program.cell():
            self._wrong += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket")
    parser.add_argument("--programs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hold", action="store_true")
    options = parser.parse_args()
    if options.hold:
        hold()
        return
    user = User(options)
    print("ready", flush=True)  # noqa: T201 - the protocol with its user
    for line in sys.stdin:
        if line == "go\n":
            user.go()
        else:
            print(json.dumps(user.stop()), flush=True)  # noqa: T201 - as above
    user.close()


if __name__ == "__main__":
    main()
