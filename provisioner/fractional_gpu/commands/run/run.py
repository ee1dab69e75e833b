"""`jupyter gpu run` runs any program with a lease, as if it were a kernel, and suspends it when it is idle.

The command checks its options, takes a lease, and starts a small program, the stub, under that lease. Once the stub has the GPU, it
replaces itself with the program. `supervisor` maintains the lease until the program exits, and `jupyter gpu run` returns its exit status.
"""

import argparse
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from fractional_gpu.commands.run.process import (
    ENDING,
    PASSED_ON,
    TIMEOUT_S,
    CannotRunError,
    EndedError,
    HeldCommand,
    attach,
    check_program,
    command_environment,
    die_of,
    signals_raise,
    unless_ignored,
    wait_for_gpu,
)
from fractional_gpu.commands.run.supervisor import Supervisor, say
from fractional_gpu.commands.terminal.arguments import DURATIONS, FRACTIONS, Parser, checked_pool, whole_number
from fractional_gpu.commands.terminal.text import UsageError, parse_argument
from fractional_gpu.core.units import format_duration, parse_duration_ms, parse_fraction_milli, parse_memory_mib
from fractional_gpu.host.wakeups import handling
from fractional_gpu.jupyter.kernel_lease import KernelLease, environment_with, lease_label, take_lease
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.limits import MAX_WAIT_S
from fractional_gpu.protocol.messages import COMMAND, LeaseRequest

_PORTS: Final = range(1, 65_536)
_DEVICES: Final = range(1, 9)
_PRIORITIES: Final = range(-1000, 1001)
_KILLED: Final = frozenset(
    {-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGTERM}
)  # as in a shell, 128 is added
_DESCRIPTION: Final = (
    "Run a program on a share of a GPU, such as a script or a model server. It can be suspended while idle."
)
_EPILOG: Final = """\
examples:
  jupyter gpu run --fraction 1/4 -- python train.py --epochs 3
  jupyter gpu run --memory 20GiB --serve 8000 -- vllm serve MODEL --port 8000
  jupyter gpu run --wait 0 -- python probe.py       now or not at all

The exit status is the command's; if a signal kills the command, the same signal kills this program ($? is 128 + N). Signals are passed
on to the command; a second SIGINT, SIGTERM or SIGHUP kills it.
`jupyter gpu status` shows the command, and `suspend`, `resume`, `pin`, `resize` and `evict` work on it.
It can be suspended while it is not using the GPU and, with --serve, has no open connection. It loses nothing, and resumes automatically.
"""


def configure(parser: Parser) -> None:
    parser.describe(_DESCRIPTION, _EPILOG)
    fraction = os.environ.get("JUPYTER_GPU_DEFAULT_FRACTION")
    parser.argument("--fraction", "FRACTION", "the share (default: 1/4)", by=FRACTIONS, default=fraction)
    parser.argument("--memory", "SIZE", "device memory, for example 20GiB (default: the fraction's share)")
    parser.argument("--devices", "N", "the number of whole GPUs, 1 to 8 (default: 1)", default="1")
    parser.argument("--priority", "N", "higher priorities go first, up to the pool's limit", default="0")
    parser.argument(
        "--serve",
        "PORT",
        "a TCP port that the program serves: an open connection keeps it in use, and a new one resumes it (repeatable)",
        action="append",
        default=[],
    )
    add_program(parser)


def add_program(parser: Parser) -> None:
    pool = os.environ.get("JUPYTER_GPU_DEFAULT_POOL") or "default"
    parser.argument("--pool", "POOL", "the pool of devices (default: default)", default=pool)
    parser.argument("--name", "TEXT", "the program's name in `jupyter gpu status`", default="")
    parser.argument("--wait", "DURATION", "how long to wait for room (default: no limit)", by=DURATIONS)
    parser.argument("command", "COMMAND", "the program and its arguments", nargs=argparse.REMAINDER)


def run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    request, ports, wait_ms = (
        _request(options, command),
        [whole_number("--serve", text, _PORTS) for text in options.serve],
        parse_wait(options.wait),
    )
    check_program(command)
    noted: list[int] = []
    # A signal that arrives when the command begins is meant for the command.
    with handling(unless_ignored(PASSED_ON, lambda number, _frame: noted.append(number))):
        try:
            with signals_raise():
                lease, held, environment = _prepare(command, request, wait_ms, served=bool(ports))
        except EndedError as ended:  # a stub that is still held ends with this process
            return die_of(ended.number)
        try:
            running = held.go(environment)
        except CannotRunError:
            with suppress(FractionalGPUError):
                lease.release()
            raise
        supervisor = Supervisor(lease, running.pid, ports)
        supervisor.start()
        status = running.wait(
            noted=noted,
            passed_on=lambda number: supervisor.wake(ending=number in ENDING),
            continued=supervisor.wake,
        )
    killed = status in _KILLED and not running.killed_by_us
    supervisor.close(was_killed=killed)
    with suppress(FractionalGPUError):  # the broker also notices that the command has ended
        lease.release()
    return die_of(-status) if status < 0 else status


def _request(options: argparse.Namespace, command: Sequence[str]) -> LeaseRequest:
    if not command:
        raise UsageError("give a program after --, for example: jupyter gpu run --fraction 1/4 -- python train.py")
    devices = whole_number("--devices", options.devices, _DEVICES)
    if devices > 1 and options.fraction not in (None, "1", os.environ.get("JUPYTER_GPU_DEFAULT_FRACTION")):
        raise UsageError(
            f"--fraction {options.fraction} cannot be combined with --devices {devices}, because several GPUs are always allocated whole; "
            "leave --fraction out"
        )
    fraction = "1" if devices > 1 else options.fraction or "1/4"
    # Show only the names of the program and of its first file, because arguments may be secret.
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    is_file = os.path.isfile(script)  # noqa: PTH113 - a word may be a whole program, which is too long for a path
    names = [Path(command[0]).name, *([Path(script).name] if is_file else [])]
    return LeaseRequest(
        fraction_milli=parse_argument(parse_fraction_milli, fraction),
        pool=checked_pool(options.pool),
        memory_mib=parse_argument(parse_memory_mib, options.memory) if options.memory is not None else None,
        devices=devices,
        priority=whole_number("--priority", options.priority, _PRIORITIES),
        label=lease_label(options.name or " ".join(names)),
        gated=False,
        kind=COMMAND,
    )


def parse_wait(text: str | None) -> int | None:
    wait_ms = None if text is None else parse_argument(parse_duration_ms, text)
    if wait_ms is not None and wait_ms > MAX_WAIT_S * 1000:
        longest = format_duration(MAX_WAIT_S * 1000)
        raise UsageError(f"--wait must be at most {longest}, not {text}; leave it out to wait without a limit")
    return wait_ms


def _prepare(
    command: Sequence[str], request: LeaseRequest, wait_ms: int | None, *, served: bool
) -> tuple[KernelLease, HeldCommand, dict[str, str]]:
    lease = take_lease(request, timeout_s=TIMEOUT_S)
    held: HeldCommand | None = None
    try:
        held = HeldCommand(command, environment_with(lease, {**os.environ, "JUPYTER_GPU_KIND": COMMAND}))
        attach(lease, held.pid, served=served)
        granted = wait_for_gpu(lease, wait_ms, say)
    except BaseException:
        with suppress(FractionalGPUError):
            lease.release()
        if held is not None:
            held.give_up()
        raise
    return lease, held, command_environment(lease, granted)
