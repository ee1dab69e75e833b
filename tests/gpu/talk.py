"""A process that answers one JSON object a line, with a time limit on each answer: a driver that hangs does not stop the asking process."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

__all__ = ["JOB_FILE", "EndedError", "RefusedError", "SilentError", "TalkError", "Talker", "gone"]

JOB_FILE: Final = "CUDA_CHECKPOINT_JOB_FILE"
_END_S: Final = 10.0
_TAIL: Final = 2000


class TalkError(Exception):
    """The process did not do what it was asked to do."""


class SilentError(TalkError):
    """It has not answered in time, and still may."""


class EndedError(TalkError):
    """It ended instead; the message has the end of what it wrote to its standard error."""


class RefusedError(TalkError):
    """It answered with an error. `answer` is the whole answer."""

    def __init__(self, message: str, answer: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.answer = dict(answer)


class Talker:
    """A child process, killed with the block.

    `prefix`: the program that starts it; `uid`: run it as this user, which needs root; `job_file`: it has one for checkpoints of itself and
    its forked children, from driver 590 on, and `given` is what tests/gpu/caller.py needs then.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        job_file: bool = False,
        uid: int | None = None,
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._rest = b""
        environment = {**os.environ, **(environment or {})}
        files = [os.memfd_create("job")] if job_file else []
        for file in files:
            environment[JOB_FILE] = f"/proc/self/fd/{file}"
        as_user: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd="/",
            bufsize=0,
            pass_fds=files,
            **as_user,
        )
        self.given: dict[str, Any] = {}
        for file in files:
            self.given["job_file"] = f"/proc/{self.pid}/fd/{file}"
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def ask(self, within_s: float, **request: object) -> dict[str, Any]:
        """Return the answer. Raises TalkError's kinds: SilentError after the seconds, EndedError, RefusedError."""
        self.send(**request)
        return self.listen(within_s, json.dumps(request))

    def send(self, **request: object) -> None:
        """Ask without waiting. Raises EndedError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._ended(json.dumps(request)) from None

    def listen(self, within_s: float, what: str) -> dict[str, Any]:
        """Return the next answer; `what` was asked is for the message. Raises as `ask`."""
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + within_s, what))
        if "error" in answer:
            raise RefusedError(str(answer["error"]), answer)
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Signal it."""
        self.process.send_signal(number)

    def errors(self) -> str:
        """Return the end of what it wrote to its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-_TAIL:].strip()

    def close(self) -> None:
        """Kill it. A process that a driver keeps from ending is left behind after some seconds."""
        with suppress(ProcessLookupError):
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self._errors.close()

    def _line(self, end: float, what: str) -> bytes:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            readable = left > 0 and select.select([descriptor], [], [], left)[0]
            if not readable:
                raise SilentError(f"process {self.pid} has not answered in time: {what}")
            read = os.read(descriptor, 1 << 16)
            if not read:
                raise self._ended(what)
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _ended(self, what: str) -> EndedError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        last = (self.errors().splitlines() or ["nothing on its standard error"])[-1]
        return EndedError(f"process {self.pid} ended with status {self.process.returncode} at {what}: {last}")


def gone(pid: int, within_s: float) -> bool:
    """Whether no such process is left, after at most this many seconds. A zombie counts as gone: the driver has released it."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - read again and again
                if file.read().rpartition(b")")[2].split()[0] == b"Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False
