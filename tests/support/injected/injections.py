"""Failpoints and faults, for the modules that `sitecustomize` names.

There is a failpoint before and after each step that changes the devices, the broker's state or the ledger. There, a process is killed, a
thread is blocked or a write fails. `JUPYTER_GPU_FAILPOINTS` names a file with one line: the name of a point, the number of the visit to
that point, and `kill`, `hang` or `fail`. The file is removed before the action, so that a restarted process survives. Every visit is
recorded in a file with the suffix `.reached`, so visits are counted over all processes.

Each function in `POINTS` is a point before it and one after it, named by who runs it, such as `kernel.Gate.close.before`. A function
that is no longer there is an error at once.

Simulated hardware has the faults and settings of `tests/support/faults.py`.
"""

import fcntl
import functools
import importlib.machinery
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

DEFAULTS = {"checkpoint_mib_s": 0, "restore_mib_s": 0, "context_mib": 32, "checkpointable": 1}
"""The settings of simulated hardware. 0 MiB/s is unlimited, and 0 `checkpointable` is a driver that cannot checkpoint."""
_UNABLE = "the simulated driver was told that it cannot checkpoint"
_POLL_S = 0.005
POINTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fractional_gpu.jupyter.provisioner": (
        "server",
        (
            "FractionalGPUProvisioner.pre_launch",
            "FractionalGPUProvisioner.launch_kernel",
            "FractionalGPUProvisioner.shutdown_requested",
            "FractionalGPUProvisioner.cleanup",
        ),
    ),
    "fractional_gpu.jupyter.kernel_lease": (
        "server",
        (
            "take_lease",
            "renew_lease",
            "_write_token",
            "KernelLease.attach",
            "KernelLease.detach",
            "KernelLease.release",
        ),
    ),
    "fractional_gpu.jupyter.kernel_record": ("server", ("RecordFile.write", "RecordFile.remove")),
    "fractional_gpu.client.client": ("kernel", ("BrokerClient.answer",)),
    "fractional_gpu_kernel.cells.broker_channel": ("kernel", ("BrokerChannel._follow", "BrokerChannel._obey")),
    "fractional_gpu_kernel.cells.acquire": ("kernel", ("Acquirer._call",)),
    "fractional_gpu_kernel.cells.gate": ("kernel", ("Gate.open", "Gate.close", "Gate.enter", "Gate.leave")),
    "fractional_gpu.gpu.worker_link": (
        "link",
        (
            "WorkerLink.start",
            "WorkerLink.state",
            "WorkerLink.lock",
            "WorkerLink.checkpoint",
            "WorkerLink.restore",
            "WorkerLink.unlock",
        ),
    ),
    "fractional_gpu.gpu.simulated.checkpointer": (
        "worker",
        (
            "SimulatedCheckpointer.state",
            "SimulatedCheckpointer.lock",
            "SimulatedCheckpointer.checkpoint",
            "SimulatedCheckpointer.restore",
            "SimulatedCheckpointer.unlock",
        ),
    ),
}


def reach(name: str) -> bool:
    """Kill this process, hang, or return True to make the caller fail, if the test's file says so for this point."""
    file = os.environ["JUPYTER_GPU_FAILPOINTS"]
    record = os.open(f"{file}.reached", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(record, fcntl.LOCK_EX)  # one process at a time, so that each visit has a different number
        os.write(record, f"{name}\n".encode())
        times = os.pread(record, os.fstat(record).st_size, 0).split(b"\n").count(name.encode())
        try:
            wanted, time, action = Path(file).read_text().split()
        except FileNotFoundError:
            return False
        if (wanted, int(time)) != (name, times):
            return False
        Path(file).unlink()
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os.close(record)
    if action == "hang":
        threading.Event().wait()
    return True


def _between(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    import inspect  # noqa: PLC0415 - kernels without failpoints stay light

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
            reach(f"{name}.before")
            value = await function(*args, **kwargs)
            reach(f"{name}.after")
            return value

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as above
        reach(f"{name}.before")
        value = function(*args, **kwargs)
        reach(f"{name}.after")
        return value

    return called


def _events(module: Any) -> None:  # noqa: ANN401 - a module of ours
    """Name each event's points after its kind and the state of its lease, such as `event.Wanted@suspended.before`."""
    dispatch = module.Broker.dispatch

    def dispatched(self: Any, event: Any) -> Any:  # noqa: ANN401 - as the method
        lease = self.arbiter.lease(getattr(event, "lease_id", ""))
        name = f"event.{type(event).__name__}" + (f"@{lease.state}" if lease is not None else "")
        return _between(name, dispatch)(self, event)

    module.Broker.dispatch = dispatched


def _ledger(module: Any) -> None:  # noqa: ANN401 - as above
    """Name a transaction's points after each of its writes; one more, `unfinished`, is before its commit."""
    write, run = module.LedgerWriter._write, module._run

    def reached(acts: Sequence[Any], moment: str) -> None:
        for name in sorted({getattr(getattr(act, "func", act), "__name__", "write") for act in acts}):
            if reach(f"ledger.{name}.{moment}"):
                raise module.LedgerError("the ledger cannot be used: a test simulates that the disk is full")

    def written(self: Any, acts: Sequence[Any]) -> Any:  # noqa: ANN401 - as the method
        reached(acts, "before")
        failures = write(self, acts)
        reached(acts, "after")
        return failures

    def ran(acts: Sequence[Any], failures: Any) -> None:  # noqa: ANN401 - as the function
        run(acts, failures)
        reached(acts, "unfinished")

    module.LedgerWriter._write, module._run = written, ran


def _replies(module: Any) -> None:  # noqa: ANN401 - as above
    """A point before each reply, `api.create.reply`, and before each line of a stream."""
    reply, line = module.Handler.reply_with, module.Handler.write_line

    def reached(handler: Any, moment: str) -> None:  # noqa: ANN401 - a handler
        reach(f"api.{handler.route.name if handler.route is not None else 'missing'}.{moment}")

    def replied(self: Any, body: bytes, content_type: str) -> None:  # noqa: ANN401 - as the method
        reached(self, "reply")
        reply(self, body, content_type)

    async def written(self: Any, message: object) -> None:  # noqa: ANN401 - as the method
        reached(self, "line")
        await line(self, message)

    module.Handler.reply_with, module.Handler.write_line = replied, written


def _steps(module: Any) -> None:  # noqa: ANN401 - as above
    """A point `setup-machine` before each step that changes the machine, and one after the last."""
    do = module.Machine.do

    def marked(act: Callable[[], object]) -> Callable[[], object]:
        def acted() -> None:
            reach("setup-machine")
            act()

        return acted

    def done(self: Any, steps: Sequence[Any], *, dry: bool) -> bool:  # noqa: ANN401 - as the method
        value: bool = do(self, [(text, act and marked(act)) for text, act in steps], dry=dry)
        reach("setup-machine")
        return value

    module.Machine.do = done


def _checkpointer(module: Any) -> None:  # noqa: ANN401 - as above
    module.SimulatedCheckpointer._copy_all = _paced(module.SimulatedCheckpointer._copy_all)
    for operation in ("state", "lock", "checkpoint", "restore", "unlock"):
        function = getattr(module.SimulatedCheckpointer, operation)
        setattr(module.SimulatedCheckpointer, operation, module.translated(_struck(module, operation, function)))


def _struck(module: Any, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ANN401 - as above
    @functools.wraps(function)
    def called(self: Any, pid: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
        fault_id, fault = _due(self._store, operation, pid)
        kind, _, value = fault.partition(":")
        if kind == "fail":
            raise module.GPUError(module.GPUErrorCode(value), f"injected fault: {value}")
        if operation in ("lock", "checkpoint") and not _setting(self._store, "checkpointable"):
            raise module.GPUError(module.GPUErrorCode.NOT_SUPPORTED, f"{operation} of process {pid}: {_UNABLE}")
        if kind in ("slow", "hang"):
            _wait(self._store, fault_id, value)
        if kind == "lie":
            return module.ProcessState(value) if value else None
        found = function(self, pid, *args, **kwargs)
        if kind == "late":
            _wait(self._store, fault_id, value)
        return found

    return called


def _setting(store: Any, name: str) -> int:  # noqa: ANN401 - the host's store
    rows = store.query("SELECT value FROM meta WHERE name='settings'")
    return int({**DEFAULTS, **(json.loads(rows[0][0]) if rows else {})}[name])


def _paced(copy_all: Callable[..., None]) -> Callable[..., None]:
    def paced(self: Any, key: str, source: str, target: str, **named: Any) -> None:  # noqa: ANN401 - as the method
        begun_s = time.monotonic()
        copy_all(self, key, source, target, **named)
        if mib_s := _setting(self._store, "restore_mib_s" if target == "device" else "checkpoint_mib_s"):
            size = self._store.query("SELECT COALESCE(SUM(bytes), 0) FROM allocations WHERE process=?", key)[0][0]
            time.sleep(max(0.0, begun_s + size / mib_s / 2**20 - time.monotonic()))

    return paced


def _context(module: Any) -> None:  # noqa: ANN401 - as above
    begin = module.Context.__init__

    def begun(self: Any) -> None:  # noqa: ANN401 - as the method
        with suppress(module.SimulatedHostError), closing(module.Store(module._environment()[0])) as store:
            module.CONTEXT_MIB = _setting(store, "context_mib")
        begin(self)

    module.Context.__init__ = begun


def _monitor(module: Any) -> None:  # noqa: ANN401 - as above
    devices = module.SimulatedMonitor.devices

    def found(self: Any) -> list[Any]:  # noqa: ANN401 - as the method
        if _setting(self._store, "checkpointable"):
            return list(devices(self))
        return [replace(one, checkpointable=False, why_not=_UNABLE) for one in devices(self)]

    module.SimulatedMonitor.devices = module.translated(found)


def _due(store: Any, operation: str, pid: int) -> tuple[int, str]:  # noqa: ANN401 - the host's store
    """Take the oldest fault that is for this operation on this process, if there is one."""
    due = (
        "SELECT id, fault FROM faults WHERE operation=? AND (pid IS NULL OR pid=?) "
        "AND (left IS NULL OR left > 0) ORDER BY id"
    )
    if store.query("SELECT 1 FROM sqlite_master WHERE name='faults'") and store.query(due, operation, pid):
        with store.transaction() as db:
            if (row := db.execute(due, (operation, pid)).fetchone()) is not None:
                db.execute("UPDATE faults SET left = left - 1, taken = taken + 1 WHERE id=?", (row[0],))
                return row[0], row[1]
    return 0, ""


def _wait(store: Any, fault_id: int, milliseconds: str) -> None:  # noqa: ANN401 - as above
    if milliseconds:
        time.sleep(int(milliseconds) / 1000)
        return
    while store.query("SELECT 1 FROM faults WHERE id=?", fault_id):
        time.sleep(_POLL_S)


_NAMED: dict[str, Callable[[ModuleType], None]] = {
    "fractional_gpu.broker.broker": _events,
    "fractional_gpu.broker.persistence.ledger_writer": _ledger,
    "fractional_gpu.broker.api.handler": _replies,
    "fractional_gpu.commands.setup_machine": _steps,
}


_HARDWARE: dict[str, Callable[[ModuleType], None]] = {
    "fractional_gpu.gpu.simulated.checkpointer": _checkpointer,
    "fractional_gpu.gpu.simulated.context": _context,
    "fractional_gpu.gpu.simulated.monitor": _monitor,
}
_FAILS = "JUPYTER_GPU_FAILPOINTS" in os.environ


def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Find a module of the product, with what this file adds to it."""
    is_changed = fullname in _HARDWARE or (_FAILS and (fullname in POINTS or fullname in _NAMED))
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if is_changed else None
    if spec is not None and spec.loader is not None:
        spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # as below
    return spec


class _Loader:  # no `importlib.abc.Loader`: importing it takes a sixth of a small process's start
    def __init__(self, loader: Any) -> None:  # noqa: ANN401 - a loader
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:  # noqa: ANN401 - a module, or None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__name__ in _HARDWARE:
            _HARDWARE[module.__name__](module)
        if not _FAILS or module.__name__ not in {*POINTS, *_NAMED}:
            return
        if module.__name__ in _NAMED:
            _NAMED[module.__name__](module)
            return
        who, functions = POINTS[module.__name__]
        for name in functions:
            *owners, last = name.split(".")
            owner: Any = functools.reduce(getattr, owners, module)
            setattr(owner, last, _between(f"{who}.{name}", getattr(owner, last)))
