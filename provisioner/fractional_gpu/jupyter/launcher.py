"""Gets a GPU lease and runs a kernel's command with it. For programs that ignore kernel provisioners, such as VS Code.

python -P -m fractional_gpu.jupyter.launcher --pool NAME --fraction F [--memory SIZE] -- KERNEL COMMAND ...

The process *becomes* the kernel, so that its parent can signal it, wait for it and get its exit code. This takes two execs: the broker
attaches a process only if the lease's id is in its environment, and only an exec can put it there. The broker ends the lease when the
process exits. If no lease is available, the kernel is not started: the command prints one sentence to stderr and exits with code 1.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.jupyter.kernel_command import parse_kernel_config, plan_kernel
from fractional_gpu.jupyter.kernel_lease import (
    attach_request,
    environment_with,
    kernel_request,
    lease_label,
    take_lease,
)
from fractional_gpu.protocol.errors import BadRequestError, FractionalGPUError
from fractional_gpu.protocol.limits import MAX_NAME

_MODULE = "fractional_gpu.jupyter.launcher"
_TIMEOUT_S = 30.0
_STANZA_KEYS = ("pool", "fraction", "memory", "simulate")
_LONGEST_CONNECTION = 64 * 1024  # bytes


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(sys.argv[1:] if arguments is None else arguments)
    # Interrupts are meant for the kernel, which does not run yet. The exec restores the default action.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        if options.attach:
            _attach_and_become(options)
        _lease_and_become(options)
    except FractionalGPUError as error:
        sys.stderr.write(f"No GPU for this kernel: {error}\n")
    except OSError as error:
        sys.stderr.write(f"Could not run the kernel's command {options.command[0]}: {error.strerror}\n")
    return 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}", description="Take a GPU lease, then run a kernel in this process."
    )
    parser.add_argument("--pool", default="default")
    parser.add_argument("--fraction", default="1/4")
    parser.add_argument("--memory")
    parser.add_argument("--simulate")
    parser.add_argument("--language", default="python")
    parser.add_argument("--label", default="")
    parser.add_argument("--attach", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="the kernel's command, after --")
    return parser.parse_args(arguments)


def _lease_and_become(options: argparse.Namespace) -> NoReturn:
    stanza = {name: value for name in _STANZA_KEYS if (value := getattr(options, name)) is not None}
    asked, simulate = parse_kernel_config(stanza, default_pool="default", default_fraction="1/4")
    command = list(options.command)
    path, _ = _connection(command)
    plan = plan_kernel(command, os.environ, str(Path.cwd()), options.language)
    command = plan.command(command)
    if plan.obstacle:
        sys.stderr.write(f"{plan.obstacle}.\n")
    kernel_id = path.stem.removeprefix("kernel-")[:MAX_NAME]
    label = lease_label(os.environ.get("JPY_SESSION_NAME") or options.label or Path.cwd().name)
    request = kernel_request(asked, kernel_id=kernel_id, label=label, gated=plan.gated)
    lease = take_lease(request, timeout_s=_TIMEOUT_S, simulate=simulate)
    try:
        step = [sys.executable, "-P", "-m", _MODULE, "--attach", "--language", options.language, "--", *command]
        os.execve(sys.executable, step, environment_with(lease, os.environ))  # noqa: S606 - no shell is wanted
    except (FractionalGPUError, OSError):
        with suppress(FractionalGPUError):
            lease.release()
        raise


def _attach_and_become(options: argparse.Namespace) -> NoReturn:
    lease_id, token_file = os.environ["JUPYTER_GPU_LEASE"], Path(os.environ["JUPYTER_GPU_TOKEN_FILE"])
    command = list(options.command)
    _, connection = _connection(command)
    request = attach_request(os.getpid(), connection, command, options.language)
    with BrokerClient(os.environ["JUPYTER_GPU_SOCKET"], token=token_file.read_text(encoding="ascii")) as client:
        try:
            client.attach(lease_id, request)
            os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
        except (FractionalGPUError, OSError):
            token_file.unlink(missing_ok=True)
            with suppress(FractionalGPUError):
                client.release(lease_id)
            raise


def _connection(command: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    for word in command[1:]:
        path = Path(word.partition("=")[2] if word.startswith("-") else word)
        if path.suffix != ".json" or not path.is_file() or path.stat().st_size > _LONGEST_CONNECTION:
            continue
        with suppress(ValueError, OSError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and "iopub_port" in content:
                return path, content
    raise BadRequestError(
        f"the command {' '.join(command)[:200]!r} does not name a connection file; add {{connection_file}}, as in the argv of a "
        "kernelspec, and let the program that starts the kernel write that file first"
    )


if __name__ == "__main__":
    sys.exit(main())
