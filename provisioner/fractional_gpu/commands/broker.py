"""`jupyter gpu broker` starts, stops and restarts the broker. It imports `fractional_gpu.broker.process.app` only to run a broker."""

import argparse
import gc
import io
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, fields
from pathlib import Path

from fractional_gpu.broker.process.restarting import BrokerOptions, resolved, start_detached
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import ensure_broker, restart_command, socket_path
from fractional_gpu.client.http import ANSWER_S, claim_address, is_service_socket
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import CommandError, UsageError, answer, say
from fractional_gpu.host.claims import holder
from fractional_gpu.host.process import identify, open_pidfd, owner_uid, read_command, read_stat
from fractional_gpu.protocol.errors import FractionalGPUError

_BROKER_OPTIONS = ("config_file", "simulate", "idle_exit", "state_dir", "settings", "worker_socket", "log_level")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

EPILOG = """\
examples:
  jupyter gpu broker                                  on your own socket, in the foreground
  jupyter gpu broker --detach                         in the background; returns once it is ready
  jupyter gpu broker --simulate 2x80GiB               two simulated GPUs instead of real ones
  jupyter gpu broker --generate-config > jupyter_gpu_config.py
  jupyter gpu broker --config jupyter_gpu_config.py   with your own pools and policies
  jupyter gpu broker --service                        for all users of a machine: what the systemd unit runs
  jupyter gpu broker --restart                        restart the running one in the background, with the same options
  jupyter gpu broker --stop --json

There is one broker for each machine or user. The first kernel that needs a GPU starts it, except in a Slurm job
or Kubernetes pod, which would take the broker down when it ends. It exits when it is no longer needed, but never while kernels hold
or wait for a GPU. Ctrl-C, SIGTERM or --stop also stops it. Kernels keep running: resident ones work as before, and suspended ones
stay suspended until their next cell starts a broker. With --service, an administrator starts and stops it.

--stop and --restart also find a broker that is not responding, and one whose socket was deleted. They send SIGTERM, then SIGKILL
after 30 s; kernels lose nothing either way. Restart a supervised broker through its supervisor: use systemctl for a system service.
A hub restarts its own broker.
"""


def configure(parser: Parser) -> None:
    parser.describe("Run the broker, which assigns kernels to GPUs and suspends and resumes them.", EPILOG)
    parser.argument("--socket", "PATH", "the socket to listen on (default: $JUPYTER_GPU_SOCKET, else your own socket)")
    parser.argument("--config", "FILE", "a configuration file (see --generate-config)", dest="config_file")
    parser.flag("--generate-config", "print an example configuration file and exit")
    parser.argument(
        "--simulate",
        "COUNTxMEMORY",
        "use simulated GPUs instead of real ones, such as 2x80GiB (default: $JUPYTER_GPU_SIMULATE, else real GPUs)",
    )
    parser.flag("--detach", "run in the background; exit with 0 once a broker answers on the socket")
    parser.argument(
        "--idle-exit", "DURATION", "exit after this long without kernels or requests, such as 10m, or never"
    )
    parser.argument(
        "--state-dir",
        "DIR",
        "the folder for the ledger: an absolute path on a local disk (default: this host's folder in your state folder)",
    )
    parser.argument("--settings", "JSON", "settings by name, passed by a hub; they override the configuration files")
    parser.flag(
        "--service",
        "serve all users of the machine; run it as root, outside any job or pod (default socket: "
        "$JUPYTER_GPU_SOCKET, else /run/jupyter-gpu/broker.sock)",
    )
    parser.flag(
        "--stand-by", "if another broker is using the socket, wait for it to end, then take over (for a service)"
    )
    parser.argument(
        "--worker-socket",
        "PATH",
        "let the service on this socket (`jupyter gpu node worker`) start the checkpoint worker, so that this process needs no "
        "privileges; for containers",
    )
    ending = parser.add_mutually_exclusive_group()
    ending.add_argument("--stop", action="store_true", help="stop the broker on the socket; kernels keep running")
    ending.add_argument(
        "--restart", action="store_true", help="restart the broker in the background with the same options"
    )
    parser.flag("--json", "with --stop and --restart: print what was done as one JSON object")
    parser.argument("--log-level", None, "the log level (default: INFO)", choices=LOG_LEVELS, type=str.upper)


def _check_ending(options: argparse.Namespace) -> None:
    if not (options.stop or options.restart):
        if options.json:
            raise UsageError(
                "--json can only be used with --stop or --restart; `jupyter gpu status --json` shows a running broker"
            )
        return
    what = "--stop" if options.stop else "--restart"
    others = [*_BROKER_OPTIONS, "generate_config", "detach", "service", "stand_by"]
    if given := [f"--{name.removesuffix('_file').replace('_', '-')}" for name in others if getattr(options, name)]:
        raise UsageError(
            f"{what} cannot be combined with {', '.join(given)}: a restarted broker keeps its options. To change them, stop it and "
            f"start it again"
        )


def _about_unused_options(options: argparse.Namespace, given: BrokerOptions) -> str:
    if not any(getattr(options, name) for name in _BROKER_OPTIONS):
        return ""
    try:
        path = resolved(given).socket or ""
        with BrokerClient(path, timeout_s=ANSWER_S) as client:
            pid = client.ping().pid
    except FractionalGPUError:
        return ""
    return (
        f"note: a broker (process {pid}) is already running on {path} and keeps its options; "
        f"to change them, stop it with `jupyter gpu broker --stop --socket {path}`, then run this command again"
    )


def run(options: argparse.Namespace) -> int:
    _check_ending(options)
    if options.stop or options.restart:
        return run_stop(options)
    if options.generate_config:
        from fractional_gpu.config import example_config  # noqa: PLC0415 - heavy, and needed here only

        sys.stdout.write(example_config())
        return 0
    given = BrokerOptions(**{one.name: getattr(options, one.name) for one in fields(BrokerOptions)})
    if options.detach:
        unused = _about_unused_options(options, given)
        # Print the broker's output below the progress bar, not into it.
        with Progress("starting the broker ...", silent=True), redirect_stderr(io.StringIO()) as said:
            code = start_detached(given)
        sys.stderr.write(said.getvalue())
        if code == 0 and unused:
            say(unused, sys.stderr)
        return code
    gc.disable()  # as in fractional_gpu.broker.__main__
    from fractional_gpu.broker.process.app import run_broker  # noqa: PLC0415 - heavy, and needed here only
    from fractional_gpu.config import ConfigError  # noqa: PLC0415 - as above

    gc.freeze()
    gc.enable()
    try:
        return run_broker(given)
    except ConfigError as error:
        raise CommandError(str(error)) from error


# For --stop and --restart, the broker is the process that claims the socket's name, or that listens on the socket. So it is found even if
# it does not answer, or if its files were deleted. Killing it loses nothing: kernels outlive the broker, the journal records the current
# operation, and the checkpoint worker finishes this operation.

ORDERLY_S = 30.0
_KILLED_S = 10.0
_SERVICE = re.compile(r"([\w@.\\-]+\.service)\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    socket: str
    pid: int | None  # None if no broker ran
    how: str  # "orderly", "killed" or "none"
    resident: int | None
    suspended: int | None
    waiting: int | None
    restarted: int | None  # the pid of the new broker, or None if there was no restart


def find_broker(socket: str) -> int | None:
    return holder(claim_address(socket))[0] or holder(os.fsencode(socket))[0] or None


def run_stop(options: argparse.Namespace) -> int:
    path = options.socket or socket_path()
    pid = find_broker(path)
    if pid is None and is_service_socket(path):
        raise CommandError(_service_refusal(path, None))
    command = None
    status = None
    how = "none"
    if pid is not None:
        check_owner(path, pid)
        command = restart_command(
            path
        )  # read before the broker ends, because a broker without leases then removes its record
        if options.restart and command is not None:
            _check_configuration(*command)
        with suppress(FractionalGPUError), BrokerClient(path, timeout_s=ANSWER_S) as client:
            status = client.status()
        with Progress(f"stopping the broker (process {pid}) ...", silent=True):
            how = end_process(pid)
    restarted = _start(path, command) if options.restart else None
    states = None if status is None else [lease.state for lease in status.leases]
    done = Stopped(
        socket=path,
        pid=pid,
        how=how,
        resident=None if states is None else states.count("resident"),
        suspended=None if states is None else states.count("suspended"),
        waiting=None if status is None else sum(lease.position is not None for lease in status.leases),
        restarted=restarted,
    )
    answer(options, done, lambda _: _render(done))
    return 0


def _render(done: Stopped) -> list[str]:
    if done.pid is None:
        lines = [f"No broker was running on {done.socket}."]
    else:
        how = "" if done.how == "orderly" else f" (killed, because it did not stop within {ORDERLY_S:g} s)"
        lines = [f"The broker (process {done.pid}) has stopped{how}."]
    if done.restarted is not None:
        lines.append(f"A new broker (process {done.restarted}) is running on {done.socket} with the same options.")
    elif done.resident == 0 == done.suspended:
        lines.append("No kernel had GPU memory, live or saved. The next one that needs a GPU starts a broker.")
    elif done.pid is not None:
        counts = "" if done.resident is None else f" ({done.resident} resident, {done.suspended} suspended)"
        lines.append(
            f"The kernels keep running{counts}. Resident ones work as before. Suspended ones need a broker: any kernel that needs the "
            f"GPU "
            "starts one, or start it now with `jupyter gpu broker --detach`."
        )
    return lines


def check_owner(path: str, pid: int) -> None:
    if is_service_socket(path) and ((unit := _unit(pid)) or os.geteuid() != 0):
        raise CommandError(_service_refusal(path, unit))
    try:
        uid, words = owner_uid(pid), read_command(pid)
    except (ProcessLookupError, FileNotFoundError):
        return  # it has already ended
    if "rescue" in words:
        raise CommandError(
            f"process {pid} is not a broker: it is rescuing the kernels of {path}; wait for it to finish"
        )
    if os.geteuid() not in (0, uid):
        raise CommandError(
            f"the broker on {path} (process {pid}) belongs to another user (uid {uid}); only that user or an administrator can stop it"
        )


def _service_refusal(path: str, unit: str | None) -> str:
    name = unit or "jupyter-gpu"
    return (
        f"the broker on {path} is a system service; an administrator can stop it with `systemctl stop {name}` and restart it with "
        f"`systemctl restart {name}`"
    )


def _unit(pid: int) -> str | None:
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text("ascii", errors="replace").split("\n")
    except OSError:
        return None
    return next((found[1] for group in groups if (found := _SERVICE.search(group))), None)


def end_process(pid: int, number: signal.Signals = signal.SIGTERM) -> str:
    try:
        descriptor = open_pidfd(identify(pid))
    except ProcessLookupError:
        return "orderly"
    try:
        signal.pidfd_send_signal(descriptor, number)
        if read_stat(pid).stopped_or_traced:
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)  # a stopped process handles no other signal
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if poll.poll(ORDERLY_S * 1000):
            return "orderly"
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if poll.poll(_KILLED_S * 1000):
            return "killed"
    except ProcessLookupError:
        return "orderly"
    finally:
        os.close(descriptor)
    raise CommandError(
        f"process {pid} was killed but is still running: it is stuck in a system call, because of the driver or an unresponsive disk. "
        f"Check the kernel log (`dmesg`)"
    )


def _check_configuration(argv: list[str], environment: dict[str, str]) -> None:
    """Raise CommandError if a broker started with this command could not read its configuration."""
    check = ["--check" if one == "--detach" else one for one in argv]
    done = subprocess.run(check, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandError(f"the broker was not stopped, because it would not start again: {done.stderr.strip()}")


def _start(path: str, command: tuple[list[str], dict[str, str]] | None) -> int:
    try:
        with (
            Progress("starting the broker ...", silent=True),
            ensure_broker(path, command=command) as client,
        ):
            return client.ping().pid
    except FractionalGPUError as error:
        raise CommandError(f"no broker is running now: {error}") from error
