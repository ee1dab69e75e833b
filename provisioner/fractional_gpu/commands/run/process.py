"""Runs the command given to `jupyter gpu run` once it has the GPU. The command then behaves as if a shell had started it.

- The process starts as a small program (`stub`), so that the broker knows its pid before the command replaces the stub.
- The command has its own process group. If the runner controls the terminal, it hands control to this group, so that Ctrl-C and Ctrl-Z
  reach the command as in any shell. When the command is stopped, the runner takes the terminal back and stops, too. The shell's `fg` then
  continues both.
- The command inherits everything it would without the runner: file descriptors, ignored or blocked signals, niceness, CPUs and limits.
- The runner passes signals on to the group. On the second SIGINT, SIGTERM or SIGHUP, it kills the group with SIGKILL.
"""

import ctypes
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Final

from fractional_gpu.client.claims import await_grant
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.terminal.connection import watch_silence
from fractional_gpu.commands.terminal.progress import WaitLine
from fractional_gpu.commands.terminal.text import CommandError
from fractional_gpu.commands.terminal.text import say as write
from fractional_gpu.host.wakeups import Handler, drain, handling, signal_pipe
from fractional_gpu.jupyter.kernel_lease import KernelLease, environment_with
from fractional_gpu.jupyter.kernel_process import identity_of
from fractional_gpu.protocol.errors import NoRoomError
from fractional_gpu.protocol.messages import COMMAND, AttachRequest
from fractional_gpu_kernel.memory import CONTEXT, CONTEXT_MIB, DEVICE, MEMORY, MemoryLimits, framework_mib

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON: Final = (*ENDING, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_DUMPABLE: Final = 4
_STUB: Final = Path(__file__).with_name("stub.py")
_BY_TERMINAL: Final = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})


class CannotRunError(CommandError):
    """The command cannot be run. As in a shell, the exit code is 127 if there is no such program, and 126 if it is not executable."""

    def __init__(self, program: str, error: int) -> None:
        self.exit_code = 127 if error == errno.ENOENT else 126
        super().__init__(f"{program} cannot be run: {os.strerror(error)}")


def check_program(command: Sequence[str]) -> None:
    program = command[0]
    if shutil.which(program) is None:
        exists = os.sep in program and Path(program).exists()
        raise CannotRunError(program, errno.EACCES if exists else errno.ENOENT)


class HeldCommand:
    """A command that waits in a stub process until `go` is called. `environment` must contain the lease's id, for the broker to read.

    If `output` is given, stdout and stderr are written to that file, and stdin is empty. Otherwise, all three are shared with this process.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: "IO[bytes] | None" = None
    ) -> None:
        """Start the stub. Raises OSError.

        Call this only in the main thread, because the command is terminated when the thread that started it exits.
        """
        self._program = command[0]
        source, to_stub = os.pipe()
        from_stub, sink = os.pipe()
        self._to_stub, self._from_stub = os.fdopen(to_stub, "wb"), os.fdopen(from_stub, "rb")
        try:
            for descriptor in (source, sink):
                os.set_inheritable(descriptor, True)
            stub = [sys.executable, "-I", "-S", os.fspath(_STUB), str(os.getpid()), str(source), str(sink), *command]
            self._child = subprocess.Popen(
                stub,
                env=dict(environment),
                close_fds=False,  # the command gets what we inherited, while our own descriptors close on exec
                process_group=0,
                stdin=None if output is None else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        except OSError:
            self._to_stub.close()
            self._from_stub.close()
            raise
        finally:
            os.close(source)
            os.close(sink)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited by the command, but loses its status here
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.pid = self._child.pid

    def go(self, environment: Mapping[str, str]) -> "RunningCommand":
        with suppress(BrokenPipeError), self._to_stub:
            self._to_stub.write(json.dumps(dict(environment)).encode("utf-8", "surrogateescape"))
        with self._from_stub:
            failure = self._from_stub.read()
        if failure:
            self._child.wait()
            raise CannotRunError(self._program, int(failure))
        return RunningCommand(self._child)

    def give_up(self) -> None:
        """Kill the stub, or the command itself if `go` was interrupted."""
        self._to_stub.close()
        self._from_stub.close()
        self._child.kill()
        self._child.wait()


def unless_ignored(numbers: Iterable[int], handler: Handler) -> dict[int, Handler]:
    """Map each of these signals to the handler. Leave out ignored signals, such as those ignored under `nohup` or in background jobs."""
    return {number: handler for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}


class RunningCommand:
    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        self.pid = child.pid
        self.killed_by_us = False
        self._endings = 0
        self._pending: list[int] = []
        self._terminal = _own_terminal()

    def wait(self, *, noted: list[int], passed_on: Callable[[int], None], continued: Callable[[], None]) -> int:
        """Pass on the signals in `noted`, then wait for the command to end. Return its exit status, or -N if signal N killed it.

        `passed_on` is called with each signal's number after it has been passed on, and `continued` when the runner gets SIGCONT.
        """
        handlers = unless_ignored((*PASSED_ON, signal.SIGCONT), self._note)
        # Ignore SIGTTOU, which would stop this process when it sets the terminal's process group.
        with signal_pipe() as wakes, handling({**handlers, signal.SIGCHLD: self._note, signal.SIGTTOU: signal.SIG_IGN}):
            try:
                self._hand_terminal(os.getpgrp(), self.pid)
                self._pending[:0] = noted
                self._handle_signals(passed_on, continued)
                while self.poll() is None:
                    select.select([wakes], [], [])
                    drain(wakes)
                    self._handle_signals(passed_on, continued)
                return int(self._child.returncode)
            finally:
                self._hand_terminal(self.pid, os.getpgrp())

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(number)

    def _handle_signals(self, passed_on: Callable[[int], None], continued: Callable[[], None]) -> None:
        while self._pending:
            number = self._pending.pop(0)
            if number == signal.SIGCONT:
                continued()
            elif number != signal.SIGCHLD:
                self._endings += number in ENDING
                self.killed_by_us = self._endings > 1
                self._signal(signal.SIGKILL if self.killed_by_us else number)
                passed_on(number)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def poll(self) -> int | None:
        """Return the exit status (128 + N for signal N), or None if the command is alive. If Ctrl-Z stopped it, stop this process too."""
        if self._child.returncode is not None:
            return _shell_status(self._child.returncode)
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if not pid:
                return None
            if os.WIFSTOPPED(status):
                self._stop_too(os.WSTOPSIG(status))
                continue
            self._child.returncode = os.waitstatus_to_exitcode(status)
            return _shell_status(self._child.returncode)

    def has_ended(self) -> bool:
        return (
            self._child.returncode is not None
            # WNOWAIT leaves the zombie. Once it is reaped, another process may get the number of the group that `end` signals.
            or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )

    def end(self, patience_s: float) -> int:
        """Send SIGTERM to the command's group, kill any processes left after `patience_s` seconds, and return the command's exit status."""
        if self._child.returncode is None:
            self._signal(signal.SIGTERM)
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], patience_s)
            finally:
                os.close(pidfd)
            self._signal(signal.SIGKILL)  # the command's process is not reaped yet, so the group is still its own
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        while (status := self.poll()) is None:
            pass  # the process was stopped before it ended
        return status

    def _stop_too(self, number: int) -> None:
        """Stop this process, too, so that the shell gets the terminal back. When this process is continued, continue the command."""
        if self._terminal is None or number not in _BY_TERMINAL:
            return  # the process that stopped the command will continue it
        if (
            number != signal.SIGTSTP and self._foreground() == self.pid
        ):  # the command read from the terminal just before it got the terminal
            self._signal(signal.SIGCONT)
            return
        self._hand_terminal(self.pid, os.getpgrp())
        with handling({signal.SIGTSTP: signal.SIG_DFL}):
            os.killpg(os.getpgrp(), signal.SIGTSTP)  # the system ignores this without a shell above (an orphaned group)
        self._hand_terminal(os.getpgrp(), self.pid)
        self._signal(signal.SIGCONT)

    def _hand_terminal(self, giver: int, taker: int) -> None:
        if self._terminal is not None and self._foreground() == giver:
            with suppress(OSError):
                os.tcsetpgrp(self._terminal, taker)

    def _foreground(self) -> int | None:
        if self._terminal is not None:
            with suppress(OSError):  # the terminal hung up
                return os.tcgetpgrp(self._terminal)
        return None


def die_of(number: int) -> int:
    """Kill this process with the signal that killed the command, without dumping core.

    The signal cannot kill the first process in a container. In that case, return 128 + N for signal N.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return _shell_status(-number)


def _shell_status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _own_terminal() -> int | None:
    for descriptor in (0, 1, 2):
        with suppress(OSError):  # there is no terminal, or it does not control this session
            os.tcgetpgrp(descriptor)
            return descriptor
    return None


TIMEOUT_S: Final = 30.0
_TORCH: Final = "JUPYTER_GPU_MEMORY_FRACTION"


class EndedError(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def signals_raise() -> AbstractContextManager[None]:
    """Make termination signals raise EndedError in the main thread, unless they are ignored."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise EndedError(number)

    return handling(unless_ignored(ENDING, end))


def attach(lease: KernelLease, pid: int, *, served: bool = False) -> None:
    lease.attach(
        AttachRequest(**identity_of(pid), connection={}, language="", ipykernel=False, kind=COMMAND, served=served)
    )


def command_environment(lease: KernelLease, granted: Mapping[str, str]) -> dict[str, str]:
    """Return the environment a kernel would get, including variables that tell frameworks such as PyTorch their memory limit."""
    environment = {**environment_with(lease, os.environ), **granted, "JUPYTER_GPU_KIND": COMMAND}
    MemoryLimits(environment).bind({})
    device_mib = int(environment.get(DEVICE, "0"))
    if device_mib:
        mib = framework_mib(int(environment[MEMORY]), int(environment.get(CONTEXT, CONTEXT_MIB)))
        environment[_TORCH] = f"{min(1.0, mib / device_mib):.4f}"
    return environment


def wait_for_gpu(lease: KernelLease, wait_ms: int | None, say: Callable[[str], None]) -> Mapping[str, str]:
    line = WaitLine(lambda text: say(f"waiting for the GPU: {text}"))
    client = BrokerClient(lease.socket, token=lease.token, timeout_s=TIMEOUT_S)
    silence = watch_silence(client, lambda text: write(text, sys.stderr, flush=True))
    try:
        return await_grant(client, lease.lease_id, wait_ms, line.update).environment
    except NoRoomError as error:
        raise CommandError(str(error)) from None
    finally:
        silence.stop()
        line.stop()
