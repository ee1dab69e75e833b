"""Experiments on a device, each in a separate process with a time limit: one that hangs or crashes does not stop the others.

The rules:
- An item writes down what it sees at once, so what it saw before it died is kept. The results file is written after each item.
- An item ends with all that it started. What the device holds more than before it is noted (`left_mib`).
- What an item needs and the machine has not (a driver, torch, root) is its outcome, in words; it is neither a success nor a failure.
- Only the standard library, cuda-bindings and nvidia-ml-py are needed, except by items that say so.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tests.gpu.driver import DOUBLE
from tests.gpu.look import driver_messages, sees
from tests.gpu.talk import Talker, TalkError
from tests.support.paths import PYTHONPATH, ROOT

__all__ = ["Item", "NotHereError", "Note", "Setting", "cycle", "described", "main", "opened_backend", "tried"]

Note = Callable[[str, object], None]
_ROOT: Final = ROOT
_SIMULATED: Final = "1x512MiB"
_KILLED_S: Final = 10.0
_LOOK_S: Final = 20.0
_SETTLE_S: Final = 5.0
_TAIL: Final = 800
_INTERRUPTED: Final = "interrupted"


class NotHereError(Exception):
    """The item cannot be made here; the sentence says what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where an item runs, how large its things are, MiB, and its patience, seconds."""

    backend: str  # `nvidia` or `simulated:DIRECTORY`
    small_mib: int = 256
    large_mib: int = 8192
    hangs_s: float = 5.0  # a call that has not answered by then hangs
    steady_s: float = 3.0  # a state that is not one of moving has this long to change

    @property
    def simulated(self) -> bool:
        """Whether the device is simulated: there is no driver then."""
        return self.backend != "nvidia"

    @property
    def holder(self) -> str:
        """The kind of tests/gpu/holder.py that holds plain memory here."""
        return "simulated" if self.simulated else "driver"

    def hold(self, kind: str = "", **how: Any) -> Talker:  # noqa: ANN401 - Talker's
        """Start a process that holds memory. `how`: as Talker takes it."""
        environment = {**self._environment(), **how.pop("environment", {})}
        return Talker(("-m", "tests.gpu.holder", kind or self.holder), environment=environment, **how)

    @contextmanager
    def caller(self, *, uid: int | None = None, within_s: float = 30.0) -> Iterator[Talker]:
        """A process that makes checkpoint calls, once it is ready."""
        with Talker(("-m", "tests.gpu.caller", self.backend), uid=uid) as caller:
            caller.listen(within_s, "opening")
            yield caller

    def _environment(self) -> dict[str, str]:
        if not self.simulated:
            return {}
        return {
            "JUPYTER_GPU_SIMULATED_DIR": self.backend.removeprefix("simulated:"),
            "JUPYTER_GPU_SIMULATED_DEVICE": "0",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One experiment. `needs`: `driver`, `torch`, `root` and names of modules; `longest_s` its time limit."""

    act: Callable[[Setting, Note], None]
    longest_s: int = 60
    needs: tuple[str, ...] = ()


# ---- what items are made of --------------------------------------------------------------------------------------------------


def tried(act: Callable[[], object]) -> object:
    """Return what it gives, or what went wrong in words: for what is a finding either way."""
    try:
        return act()
    except (TalkError, OSError, RuntimeError, ValueError, KeyError, ImportError) as error:
        return f"{type(error).__name__}: {error}"


def cycle(caller: Talker, pid: int, *, within_s: float = 20.0, **given: object) -> dict[str, Any]:
    """Lock, checkpoint, restore and unlock, and return each answer with the state after it; ends at the first that fails.

    `given`: more of the caller's requests. Raises SilentError and EndedError of the caller.
    """
    found: dict[str, Any] = {}
    for phase in ("lock", "checkpoint", "restore", "unlock"):
        found[phase] = caller.ask(within_s, call=phase, pid=pid, **given)
        found[phase]["state_after"] = caller.ask(within_s, call="state", pid=pid)["value"]
        if found[phase]["result"] != 0:
            if phase in ("checkpoint", "restore"):
                found["unlock"] = caller.ask(within_s, call="unlock", pid=pid, **given)
                found["unlock"]["state_after"] = caller.ask(within_s, call="state", pid=pid)["value"]
            break
    return found


def described(setting: Setting, caller: Talker, pid: int) -> dict[str, Any]:
    """Return state, restore thread and NVML's entry of a process."""
    return {
        "state": caller.ask(20, call="state", pid=pid),
        "thread": caller.ask(20, call="thread", pid=pid),
        "nvml": sees(setting.backend, pid)["listed"][str(pid)],
    }


@contextmanager
def opened_backend(*, simulated: bool) -> Iterator[str]:
    """The backend's name, as for a checkpoint worker; a simulated host is made for the block."""
    if not simulated:
        yield "nvidia"
        return
    from fractional_gpu.gpu.simulated.host import create, destroy  # noqa: PLC0415 - hardware needs nothing of the simulation

    with tempfile.TemporaryDirectory(prefix="jgl-items-") as folder:
        create(Path(folder, "host"), _SIMULATED)
        try:
            yield f"simulated:{Path(folder, 'host')}"
        finally:
            destroy(Path(folder, "host"))


# ---- running them ------------------------------------------------------------------------------------------------------------


def main(module: str, items: Mapping[str, Item], arguments: Sequence[str] | None = None) -> int:
    """Run the items of a module; 0 if each of them was answered or lacks something here, 1 if one failed."""
    options = _options(items, arguments)
    if options.item:
        return _be_one(items[options.item], options)
    found: dict[str, Any] = {"items": {}}
    failed: list[str] = []
    with opened_backend(simulated=options.simulated) as backend:
        held_mib = _used_mib(backend)
        for name in options.only or items:
            _say(f"{name}: at most {items[name].longest_s} s")
            row, held_mib = _run(module, name, items[name], backend, options, before_mib=held_mib)
            found["items"][name] = row
            failed += [name] if row["outcome"] not in ("answered", "not here") else []
            _say(f"{name}: {row['outcome']} in {row['seconds']} s {row.get('why', '')}".rstrip())
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            if row["outcome"] == _INTERRUPTED:
                break
    sys.stdout.write(as_table(found))
    if failed:
        sys.stdout.write(f"not answered: {', '.join(failed)}\n")
    return int(bool(failed))


def as_table(found: Mapping[str, Any]) -> str:
    """Return the items with their outcomes and what they saw, a line each."""
    lines = []
    for name, row in found["items"].items():
        lines.append(f"{name}: {row['outcome']}{', ' + row['why'] if row.get('why') else ''} ({row['seconds']} s)")
        lines += [f"    {what}: {json.dumps(value)}" for what, value in row.get("saw", {}).items()]
    return "\n".join(lines) + "\n"


def _options(items: Mapping[str, Item], arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Experiments on a device, each in a separate process.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen, after each item")
    parser.add_argument("--only", action="append", choices=items, help="an item; may be repeated (default: all)")
    parser.add_argument("--simulated", action="store_true", help="on a simulated device, with small sizes")
    parser.add_argument("--small", action="store_true", help="with small sizes")
    parser.add_argument("--longest", type=int, metavar="SECONDS", help="time limit of each item, instead of its own")
    for hidden in ("--item", "--backend", "--answer"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _be_one(item: Item, options: argparse.Namespace) -> int:
    """Be the process of one item: write each thing it sees into the answer's file at once."""
    answer, seen = Path(options.answer), {}

    def note(name: str, value: object) -> None:
        seen[name] = value
        fresh = answer.with_suffix(".new")
        fresh.write_text(json.dumps(seen, default=str), encoding="utf-8")
        fresh.replace(answer)

    setting = Setting(backend=options.backend)
    if options.small or setting.simulated:
        setting = Setting(backend=options.backend, small_mib=16, large_mib=48, hangs_s=1, steady_s=0.5)
    try:
        item.act(setting, note)
    except NotHereError as error:
        note("not here", str(error))
    except Exception:  # noqa: BLE001 - whatever it is, it is this item's finding, and the others continue
        traceback.print_exc()
        return 1
    return 0


def _run(
    module: str, name: str, item: Item, backend: str, options: argparse.Namespace, *, before_mib: float | None
) -> tuple[dict[str, Any], float | None]:
    """Return the item's row, and what the device holds after it."""
    lacking = _lacking(item, backend)
    if lacking:
        return {"outcome": "not here", "why": lacking, "seconds": 0.0}, before_mib
    longest_s = options.longest or item.longest_s
    with tempfile.TemporaryDirectory(prefix="jgl-item-") as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-P", "-m", module, "--item", name, "--backend", backend, "--answer", str(answer)]
        begun = time.monotonic()
        with driver_messages() as messages, Path(folder, "log").open("w+b") as log:
            outcome = _supervise([*command, *(["--small"] if options.small else [])], log, longest_s)
            log.seek(0)
            said = log.read().decode(errors="replace").strip()
        row: dict[str, Any] = {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1)}
        if messages:
            row["kernel_log"] = messages
        with suppress(FileNotFoundError):
            row["saw"] = json.loads(answer.read_text(encoding="utf-8"))
        missing = row.get("saw", {}).pop("not here", "")
        if missing and outcome == "answered":
            row |= {"outcome": "not here", "why": missing}
        elif outcome != "answered":
            row["why"] = said[-_TAIL:].splitlines()[-1] if said else "it said nothing"
            row["log"] = said[-_TAIL:]
        after_mib = None if outcome == _INTERRUPTED else _settled_mib(backend, before_mib)
        if before_mib is None or after_mib is None:
            row["left_mib"] = "the device cannot be read"
        elif after_mib - before_mib >= 1:
            row["left_mib"] = round(after_mib - before_mib, 1)
        return row, after_mib


def _lacking(item: Item, backend: str) -> str:
    """Return what this machine lacks for the item, a sentence; empty if nothing."""
    for need in item.needs:
        if need == "driver":
            if backend != "nvidia":
                return "needs a driver, a simulated device has none"
        elif need == "root":
            if os.geteuid() != 0:
                return "needs root"
        elif need == "hardware":
            if backend != "nvidia" or os.environ.get(DOUBLE):
                return "needs hardware"
        elif find_spec(need) is None or (need == "torch" and os.environ.get(DOUBLE)):
            return f"needs {need}"
    return ""


def _supervise(command: Sequence[str], log: Any, longest_s: int) -> str:  # noqa: ANN401 - a binary file
    with ExitStack() as stack:
        # A separate group, so that all of the item can be ended; the session stays the step's.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), process_group=0
        )
        stack.callback(_end, process)
        try:
            status = process.wait(longest_s)
        except subprocess.TimeoutExpired:
            return f"not done within {longest_s} s"
        except KeyboardInterrupt:  # the time of all items together is over
            return _INTERRUPTED
        return "answered" if status == 0 else f"failed (status {status})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the item with what it started. What a driver keeps from ending is left, and the rest continues."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _settled_mib(backend: str, before_mib: float | None) -> float | None:
    """Return what the device holds once what has ended has given its memory back, or after some seconds."""
    end = time.monotonic() + _SETTLE_S
    while True:
        used_mib = _used_mib(backend)
        if used_mib is None or before_mib is None or used_mib - before_mib < 1 or time.monotonic() > end:
            return used_mib
        time.sleep(_SETTLE_S / 10)


def _used_mib(backend: str) -> float | None:
    """Return what the device holds, asked by a process that may hang; None if NVML does not answer."""
    command = [sys.executable, "-P", "-m", "tests.gpu.look", backend]
    try:
        done = subprocess.run(command, capture_output=True, env=_environment(), timeout=_LOOK_S, check=True)
        return float(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        return None


def _environment() -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([PYTHONPATH, *([inherited] if inherited else [])])
    return {**os.environ, "PYTHONPATH": paths, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # NVML's order


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
