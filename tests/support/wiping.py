"""One story of the wiping test: something that the product keeps on disk is removed, and every byte of the kernels must come back.

The simulated host is the hardware, and Jupyter's own files (connection files, kernelspecs) are not the product's: they stay, except where
the whole runtime folder is removed.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from tests.support.faults import configure
from tests.support.stories import CHECK, fill
from tests.support.victims import anybody, brokers, kill_all, workers
from tests.support.world import Notebook, Reply, Server, World, new_world, until

__all__ = ["CASES", "KINDS", "Case", "Outcome", "Stage", "new_stage", "play"]

MIB = 16
SPEED_MIB_S = 20  # a swap of 48 MiB, context included, takes seconds
_KEEPING = "--ServerApp.kernel_manager_class=fractional_gpu.KeepingKernelManager"
_MOST_COMMANDS = 2

_LEDGER = "state/**/ledger-simulated.sqlite"
KINDS = {
    "socket": ("run/broker.sock",),
    "socket's lock": ("run/broker.sock.lock",),
    "worker's lock": ("run/broker.sock.worker",),
    "restart file": ("run/broker.json", "state/**/broker.json"),
    "logs": ("run/broker.log", "run/broker.err"),
    "backup records": ("run/broker.sock.leases-simulated",),
    "tokens": ("run/gpu/*.token",),
    "kept records": ("run/gpu/kept/*.json",),
    "product folder": ("run/gpu",),
    "ledger": (_LEDGER,),
    "ledger's log": (f"{_LEDGER}-*",),
    "ledger with its log": (_LEDGER, f"{_LEDGER}-*"),
    "ledger's lock": (f"{_LEDGER}.lock",),
    "state folder": ("state",),
    "runtime folder": ("run",),
    "everything": ("run/gpu", "run/broker.*", "state"),
}
"""What is removed, as patterns below the world's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is removed, when (`rest` or `swap`), and whether the broker survives."""

    kind: str
    moment: str
    alive: bool

    def __str__(self) -> str:
        return f"{self.kind}, {'at rest' if self.moment == 'rest' else 'in a swap'}, broker {'alive' if self.alive else 'killed'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the bytes came back: seconds until both kernels had them, and the commands from messages that were needed."""

    took_s: float
    commands: tuple[str, ...]


CASES = tuple(
    Case(kind=kind, moment=moment, alive=alive)
    for kind in KINDS
    for moment in ("rest", "swap")
    for alive in (False, True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Two kernels whose bytes do not fit on the device together, on a server that keeps its kernels."""

    world: World
    notebooks: tuple[Notebook, Notebook]


@contextmanager
def new_stage() -> Iterator[Stage]:
    """A stage that ends with the block, whatever was removed from it."""
    with new_world() as world, _ended(world):
        (spec,) = world.install(750)
        world.start_broker()
        server = Server(world, _KEEPING)
        try:
            first, second = server.start(spec), server.start(spec)
            for seed, notebook in enumerate((first, second)):
                notebook.must(fill(seed, MIB))
            yield Stage(world=world, notebooks=(first, second))
        finally:
            server.stop()


def play(case: Case, stage: Stage) -> Outcome:
    """Tell the story. Raises AssertionError if a byte does not come back.

    The next story can be told on the same stage, unless the runtime folder was removed: the kernels' connection files are in it, and
    Jupyter does not put them back.
    """
    world, notebooks = stage.world, stage.notebooks
    try:
        until(lambda: brokers(world) == [world.broker_pid()], "one broker serves")
        _suspend(world, notebooks[0])
        with _moment(world, notebooks[0], case.moment):
            if not case.alive:
                kill_all(brokers(world))
            _wipe(world, case.kind)
        begun_s = time.monotonic()
        commands: list[str] = []
        for notebook in notebooks:
            _bring_back(world, notebook, commands)
        took_s = time.monotonic() - begun_s
        kernels = until(partial(_kernels, world), "the broker serves, after its restart where it missed a file")
        assert kernels >= {notebook.kernel_id for notebook in notebooks}, f"status has {kernels}"
        _check_put_back(world, case)
        return Outcome(took_s=took_s, commands=tuple(commands))
    except BaseException:
        sys.stderr.write("".join(f"--- {name}\n{text}\n" for name, text in world.logs().items()))
        raise


def _kernels(world: World) -> set[str] | None:
    """Return the kernels that have leases, or None while no broker serves."""
    try:
        return {lease.kernel_id for lease in world.status().leases}
    except BrokerUnavailableError:
        return None


def _suspend(world: World, notebook: Notebook) -> None:
    """Suspend the kernel if the other one has not made it leave: a lease whose size was lost may fit next to the other."""
    lease = world.lease(notebook.kernel_id)
    if lease.state == "resident":
        with world.client() as client:
            client.suspend(lease.lease_id)
    world.await_state(notebook.kernel_id, "suspended")


def _bring_back(world: World, notebook: Notebook, commands: list[str]) -> None:
    """Run the kernel's next cell; if it is refused, run the command in its message, then the cell again."""
    while True:
        reply = notebook.run(CHECK)
        if reply.status == "ok":
            assert reply.text == "intact\n", reply.text
            return
        assert len(commands) < _MOST_COMMANDS, f"{reply.error} after {commands}"
        commands.append(_named(reply))
        done = subprocess.run(
            ["bash", "-c", commands[-1]], env=world.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"`{commands[-1]}` failed: {done.stderr}"


def _named(reply: Reply) -> str:
    words = reply.error.split("`")
    assert len(words) > 2, f"no command is named: {reply.error}"
    assert "restart the kernel" not in reply.error, reply.error
    return words[1]


@contextmanager
def _moment(world: World, notebook: Notebook, moment: str) -> Iterator[None]:
    """The moment of the wiping; a swap begins before the block, and may continue after it."""
    if moment == "rest":
        yield
        return
    store = Store(world.simulated_folder)
    configure(store, checkpoint_mib_s=SPEED_MIB_S, restore_mib_s=SPEED_MIB_S)
    lease_id = world.lease(notebook.kernel_id).lease_id
    wish = threading.Thread(target=_resume, args=(world, lease_id), daemon=True)
    wish.start()
    until(lambda: any(lease.state in ("suspending", "resuming") for lease in world.status().leases), "a swap begins")
    try:
        yield
    finally:
        configure(store, checkpoint_mib_s=0, restore_mib_s=0)
        store.close()


def _resume(world: World, lease_id: str) -> None:
    """Request it; the result is not checked."""
    with suppress(FractionalGPUError), BrokerClient(world.socket) as client:
        client.resume(lease_id)


def _wipe(world: World, kind: str) -> None:
    """Remove the files of this kind. Fails if there are none."""
    paths = _paths(world, kind)
    assert paths, f"there is nothing of the kind {kind!r}"
    for path in paths:
        if path.is_dir():
            _remove_folder(path)
        else:
            path.unlink(missing_ok=True)


def _remove_folder(path: Path) -> None:
    """Remove it; a running broker may put something back."""
    with suppress(OSError):
        shutil.rmtree(path)


def _paths(world: World, kind: str) -> list[Path]:
    return sorted({path for pattern in KINDS[kind] for path in world.folder.glob(pattern)})


def _check_put_back(world: World, case: Case) -> None:
    """The product's files have been recreated."""
    for kind in ("socket", "backup records", "ledger"):
        until(partial(_paths, world, kind), f"{kind} is there after {case}")


@contextmanager
def _ended(world: World) -> Iterator[None]:
    """Leave no process behind, even if no socket leads to a broker."""
    try:
        yield
    finally:
        kill_all([pid for pid in brokers(world) if pid != world.broker_pid()], signal.SIGTERM)
        kill_all([pid for pid in (*workers(world), *anybody(world)) if pid not in (os.getpid(), world.broker_pid())])
