"""`jupyter gpu lease` reserves GPU memory for a program that was not started by Jupyter."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from fractional_gpu.client.claims import take_claim
from fractional_gpu.commands.run.process import CannotRunError, check_program
from fractional_gpu.commands.run.run import add_program, parse_wait
from fractional_gpu.commands.terminal.arguments import DURATIONS, Parser, checked_pool, whole_number
from fractional_gpu.commands.terminal.progress import WaitLine
from fractional_gpu.commands.terminal.render import lease_name
from fractional_gpu.commands.terminal.text import UsageError, answer, parse_argument, say
from fractional_gpu.core.units import format_memory, parse_duration_ms, parse_memory_mib
from fractional_gpu.jupyter.kernel_lease import environment_without, lease_label
from fractional_gpu.protocol.errors import NoRoomError
from fractional_gpu.protocol.messages import LeaseRequest

_PIDS: Final = range(1, 1 << 22)
_EPILOG: Final = """\
examples:
  jupyter gpu lease --memory 9GiB --ttl 10m          print the claim's id, its GPU and when it ends
  jupyter gpu lease --memory 9GiB -- ollama serve    the claim ends with the program, or when its time is up

`jupyter gpu pin` changes when a claim ends, and `jupyter gpu release` ends it. A claim cannot be suspended. Your programs on its GPU
that belong to no kernel count against it; start them afterwards. Memory that they still use when it ends counts as other programs' memory.
The exit status is the program's, if there is one, and 75 if there was no room in time.
"""


def configure(parser: Parser) -> None:
    parser.describe("Reserve GPU memory for a program that Jupyter does not start, such as a model server.", _EPILOG)
    parser.argument("--memory", "SIZE", "device memory, for example 9GiB")
    parser.argument("--ttl", "DURATION", "how long the claim lasts (default: as long as the pool allows)", by=DURATIONS)
    parser.argument("--holder", "PID", "end the claim when this process ends; it must be yours")
    parser.flag("--json", "print the claim as JSON")
    add_program(parser)


def run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.memory is None:
        raise UsageError("give the GPU memory with --memory, for example: jupyter gpu lease --memory 9GiB --ttl 10m")
    if command and (options.holder or options.json):
        raise UsageError("--holder and --json cannot be used with a program; leave them out")
    holder = os.getpid() if command else whole_number("--holder", options.holder, _PIDS) if options.holder else 0
    request = LeaseRequest(
        fraction_milli=0,
        memory_mib=parse_argument(parse_memory_mib, options.memory),
        pool=checked_pool(options.pool),
        label=lease_label(options.name or (Path(command[0]).name if command else "")),
        ttl_ms=parse_argument(parse_duration_ms, options.ttl or "0"),
        holder_pid=holder,
    )
    wait_ms = parse_wait(options.wait)
    if command:
        check_program(command)
    line = WaitLine(lambda text: say(f"waiting for the GPU: {text}", sys.stderr, flush=True))
    try:
        lease, device, bound = take_claim(request, wait_ms, line.update)
    except NoRoomError as error:
        say(f"jupyter gpu: {error}", sys.stderr)
        return os.EX_TEMPFAIL if error.reason == "timeout" else 1
    finally:
        line.stop()
    if command:  # the command replaces this process, which holds the claim
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvpe(command[0], command, {**environment_without("", os.environ), **bound})  # noqa: S606 - no shell
        except OSError as error:
            raise CannotRunError(command[0], error.errno or 0) from None
    size = f"{format_memory(lease.spec.reserve_mib)} of GPU {device.index} ({device.name})"
    end = time.strftime("%H:%M:%S", time.localtime(time.time() + lease.pinned_ms / 1000))
    said = f"{lease_name(lease)}: {size}, until {end}", f"CUDA_VISIBLE_DEVICES={device.device_id}"
    document = {"lease": lease, "device": device, "ends_in_ms": lease.pinned_ms, "environment": bound}
    answer(options, document, lambda _: said)
    return 0
