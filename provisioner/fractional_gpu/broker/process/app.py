"""The broker as a process. There is one per socket, started by the first program that needs it.

- A file lock next to the socket ensures that a socket has only one broker. If two programs start a broker at the same time, only one broker
  starts, and both programs use it.
- Claims on devices, which are names in the abstract socket namespace, keep brokers on different sockets, or run by different users, from
  managing the same device.
- `broker.json` next to the socket tells clients how to start this broker again after a crash.

`restarting.start_detached` starts a broker in the background. The new process runs `run_options`, as does a broker that restarts itself
(`repair`).
"""

import asyncio
import json
import logging
import math
import os
import resource
import signal
import socket as socket_module
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TextIO, TypeVar

from fractional_gpu.broker.monitoring.host_memory import protect_this_process
from fractional_gpu.broker.process.driver_start import BackendError, open_backend
from fractional_gpu.broker.process.logs import set_up_logging
from fractional_gpu.broker.process.repair import BrokerLock
from fractional_gpu.broker.process.restarting import (
    BrokerOptions,
    cannot_run,
    make_socket_folder,
    remove_restart_files,
    resolved,
    serves_everyone,
    write_restart_files,
)
from fractional_gpu.broker.process.run import BrokerRun, device_specs
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import socket_path
from fractional_gpu.client.http import claim_address, claim_holder
from fractional_gpu.client.state_folder import ledger_name, make_state_folder
from fractional_gpu.config import ConfigError, load
from fractional_gpu.gpu.interface import GPUError
from fractional_gpu.host.claims import DeviceClaim, DeviceClaimedError, NameClaim
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError, LedgerInUseError
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError

log = logging.getLogger("fractional_gpu.broker")
T = TypeVar("T")

_OTHER_PATIENCE_S = 30.0
_LETTING_GO_S = 1.0
_RETRY_S = 0.05
_OPEN_FILES = 65536
_CLAIM_VARIABLE = "JUPYTER_GPU_CLAIM"  # the descriptor of the claim that a restarting broker keeps
_SOON = "1s"  # how long a broker whose folder was deleted stays after its last lease


def run_broker(options: BrokerOptions) -> int:
    options = resolved(options)
    if sentence := _serve(options, options.socket or socket_path(), ready=None):
        sys.stderr.write(f"jupyter gpu broker: {sentence}\n")
        return 1
    return 0


def run_options(argument: str) -> int:
    """Run a broker in this process, which was started by another broker or by `start_detached`. Return the exit status.

    `argument` is JSON with the options and a file descriptor, to which the broker reports that it has started or why it could not.
    """
    given = json.loads(argument)
    ready_fd = given.pop("ready_fd", None)
    options = BrokerOptions(**given)
    if options.detach:
        _shed_inheritance()
    report = None if ready_fd is None else os.fdopen(int(ready_fd), "w")
    sentence = _serve(options, options.socket or socket_path(), ready=report)
    if sentence:
        log.error("%s", sentence)
    if report is not None and not report.closed:
        report.write(sentence)
        report.close()
    return 1 if sentence else 0


def check_options(argument: str) -> int:
    """Return 0 if the configuration can be read; otherwise print the reason and return 1. `argument` is JSON with the broker's options."""
    options = BrokerOptions(**json.loads(argument))
    try:
        load(options.config_file, _overrides(options))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _shed_inheritance() -> None:
    """Undo settings inherited from the program that started this broker. `doctor` reports those that cannot be undone."""
    os.umask(0o022)
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores these two signals
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # If the notebook that started the broker has a `ulimit -v` or `-t`, the limit would kill the broker of all kernels. Hard limits cannot
    # be raised.
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    with suppress(PermissionError):
        os.sched_setaffinity(0, range(8192))  # the system keeps only the allowed processors
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _serve(options: BrokerOptions, socket: str, *, ready: TextIO | None) -> str:
    again: tuple[BrokerOptions, int] | None = None
    with ExitStack() as stack:
        try:
            make_socket_folder(socket, service=options.service)  # before anything is written to it
            kept = _kept_claim()
            lock = BrokerLock(socket)
            stack.callback(lock.close)
            if options.stand_by and kept is None:
                lock.take(wait=True)
            patience_s = math.inf if options.stand_by else _OTHER_PATIENCE_S
            turn = _take_turn(lock, socket, ready, patience_s=patience_s, kept=kept)
            if isinstance(turn, str):
                return turn
            claims: list[NameClaim] = [] if turn is None else [stack.enter_context(turn)]
            # Each kernel takes about eight open files, while the usual soft limit is 1024.
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
            if soft != resource.RLIM_INFINITY and soft < wanted:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            settings = load(options.config_file, _overrides(options))
            set_up_logging(settings.log_level, socket, to_file=options.detach)
            protect_this_process()
            # A service may start before the driver is loaded, so it waits. If a process waits for this start, it needs the reason instead.
            everyone = options.service or serves_everyone(socket)
            undo = stack.enter_context(ExitStack())  # undone if the start fails
            patient, kind = everyone and not options.detach, settings.device_kind
            backend = stack.enter_context(open_backend(options.simulate, socket, patient=patient, device_kind=kind))
            if backend.is_new:
                undo.callback(backend.remove_if_unused)
            specs = device_specs(settings, backend)
            claims += [
                stack.enter_context(_retried(partial(DeviceClaim.claim, spec.device_id), DeviceClaimedError))
                for spec in specs
            ]
            folder = make_state_folder(socket, settings.state_dir)
            path = folder / ledger_name(simulated=backend.simulated)
            ledger = _retried(partial(Ledger.open, path), LedgerInUseError)
            write_restart_files(replace(options, state_dir=str(folder)), socket)
            run = BrokerRun(
                settings=settings,
                backend=backend,
                specs=specs,
                claims=claims,
                ledger=ledger,
                socket=socket,
                ready=ready,
                serves=undo.pop_all,
                worker_socket=options.worker_socket,
                everyone=everyone,
            )
            asyncio.run(run.main())
            if run.repair.is_due and not run.stop.is_set():
                idle_exit = _SOON if run.repair.lost_folder and settings.idle_exit is not None else options.idle_exit
                again = replace(options, idle_exit=idle_exit), -1 if turn is None else os.dup(turn.fileno())
            elif not run.leases_live:
                backend.remove_if_unused()
                remove_restart_files(socket)
        except (ConfigError, BackendError, DeviceClaimedError, LedgerError, GPUError, FractionalGPUError) as error:
            return str(error)
        except OSError as error:
            return cannot_run(socket, error)
    if again is not None:
        return _execute_again(*again, socket)
    return ""


def _execute_again(options: BrokerOptions, claim: int, socket: str) -> str:
    """Restart this broker in the same process, keeping its claim on the socket's name. If that fails, return the reason."""
    environment = dict(os.environ)
    if claim >= 0:
        os.set_inheritable(claim, True)
        environment[_CLAIM_VARIABLE] = str(claim)
    argument = json.dumps({**asdict(options), "socket": socket})
    try:
        os.execve(sys.executable, [sys.executable, "-P", "-m", "fractional_gpu.broker", argument], environment)  # noqa: S606 - no shell is needed
    except OSError as error:
        return cannot_run(socket, error)


def _kept_claim() -> NameClaim | None:
    """Return the claim that this process kept when it restarted itself, or None."""
    descriptor = os.environ.pop(_CLAIM_VARIABLE, None)
    if descriptor is None:
        return None
    listener = socket_module.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    return NameClaim(listener)


def _retried(act: Callable[[], T], busy: type[Exception]) -> T:
    """Call `act`, and retry briefly if it raises `busy`, because a killed broker releases its lock before its claims."""
    deadline = time.monotonic() + _LETTING_GO_S
    while True:
        try:
            return act()
        except busy:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def _overrides(options: BrokerOptions) -> dict[str, object]:
    try:
        named = json.loads(options.settings or "{}")
    except ValueError as error:
        raise ConfigError(f"--settings is not JSON: {error}") from None
    if not isinstance(named, dict):
        raise ConfigError('--settings must be a JSON object such as {"idle_exit": "never", "pools": {"default": {}}}')
    idle_exit = options.idle_exit or ("never" if options.service else None)
    given = {"idle_exit": idle_exit, "state_dir": options.state_dir, "log_level": options.log_level}
    return {**named, **{name: value for name, value in given.items() if value is not None}}


def _take_turn(
    lock: BrokerLock, socket: str, ready: TextIO | None, *, patience_s: float, kept: NameClaim | None = None
) -> NameClaim | str | None:
    """Try to become the socket's broker, retrying for `patience_s` seconds if the holder of the lock or the claim does not answer.

    On success, return the claim on the socket's name, or None if another user's process holds the claim, which is then ignored. If a broker
    is already running, report this to `ready` and return "". Otherwise, return a sentence explaining the failure. Infinite patience also
    waits for a running broker to end.

    A broker that has the claim but not the lock has lost its files. It will restart, keeping its claim (`kept`), and then need the lock, so
    this process releases the lock.
    """
    deadline = time.monotonic() + patience_s
    while True:
        apart = ""
        if lock.take():
            claim = kept or NameClaim.take(claim_address(socket))
            if isinstance(claim, NameClaim):
                return claim
            pid, uid = claim
            if uid not in (None, 0, os.geteuid()):
                log.warning("process %s of uid %s is using the name of the broker on %s: ignoring it", pid, uid, socket)
                return None
            lock.give_up()
            apart = "another broker" if pid is None else f"process {pid}"
        try:
            with closing(BrokerClient(socket, timeout_s=5)) as client:
                pong = client.ping()
        except BrokerUnavailableError as error:
            if time.monotonic() > deadline:
                if apart:
                    return (
                        f"{apart} already serves {socket} in another filesystem (such as a container's) and shares this network "
                        "namespace; start this broker with another --socket, or in a separate network namespace"
                    )
                holder = claim_holder(socket)
                who = "another broker" if holder is None else f"another broker, process {holder},"
                return f"{who} holds {socket}.lock but does not respond: {error}; `jupyter gpu broker --restart` ends it and starts another"
            time.sleep(_RETRY_S)
            continue
        if ready is None:
            if patience_s == math.inf:
                time.sleep(_LETTING_GO_S)
                continue
            return f"a broker (process {pong.pid}) is already running on {socket}; stop it first, or choose another --socket"
        ready.write("ready")
        return ""
