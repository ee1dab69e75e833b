"""Everything that wants a GPU, in one command: python tests/gpu/run_all.py FOLDER (see docs/gpu-tests.md).

Each step is a separate process with a time limit, and its results stay if the next one hangs or the whole run is stopped. The
kernel's messages about the driver are kept with the step. The most informative steps come first; those that may damage the machine's state
come last. `--part` takes those that fit into one command of ten minutes.
FOLDER gets a log of each step, `results.json` with what each step saw, and `summary.txt`, which is also the last thing printed: a part
makes at most eight files.

It needs only the standard library, so it can install the wheels that the rest needs (`--wheels`) without a network.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_HERE), *(str(_HERE / folder) for folder in ("provisioner", "kernelext", "hub_spawner"))]
if "tests" not in sys.modules:
    # Ours has no __init__.py: a package of this name that is installed somewhere would be found instead, wherever it is.
    sys.modules["tests"] = ModuleType("tests")
    sys.modules["tests"].__path__ = [str(_HERE / "tests")]

from tests.gpu.facts import described
from tests.gpu.figures import table
from tests.gpu.installed import entry_points_installed
from tests.gpu.look import driver_messages
from tests.support.paths import PYTHONPATH, ROOT

# Only what the tests need: other plugins of that environment may warn, and a warning is an error here. The ordinary run's conftest.py
# needs more packages than these tests do.
_PYTEST: Final = (
    *("-m", "pytest", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "--timeout=100"),
    *("--confcutdir=tests/gpu", "--durations=0"),
)
_BROKER: Final = tuple(
    f"tests/gpu/test_{name}.py" for name in ("swaps", "kills", "endings", "idle_and_caps", "waiting")
)
_KILL_S: Final = 30.0
_KILLED_S: Final = 10.0
_LOOK_S: Final = 90.0
_LEAST_S: Final = 20  # a step that has less time is not begun
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_PAGES: Final = Path("/proc/sys/vm/nr_overcommit_hugepages")
_DOUBLE_MIB, _DOUBLE_CONTEXT_MIB = 4096, 48
_ENOUGH_HUGE_PAGES: Final = 17_000  # of 2 MiB: the largest arena of the offload probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of Python's. `longest_s` is its time limit; `without_gpu` what it is given besides on a simulated device or a double.

    `json` is the option that names its results; tests are told by their environment. `tuned`: `--tune` is for this one, too.
    """

    arguments: tuple[str, ...]
    longest_s: int
    part: int
    simulated: tuple[str, ...] | None = ()  # None: it needs torch on a GPU
    double: tuple[str, ...] | None = ()
    json: str = ""
    tuned: bool = False


def _phases(longest_s: int, *sizes: str) -> Step:
    return Step(
        arguments=("tests/gpu/bench.py", "--times", "2", "--sizes", *sizes),
        longest_s=longest_s,
        part=3,
        simulated=("--simulated", "--times", "1", "--sizes", "16", "64"),
        double=("--holder", "driver", "--times", "1", "--sizes", "16", "64"),
        json="--json",
        tuned=True,
    )


def _items(module: str, longest_s: int, part: int, *more: str) -> Step:
    return Step(
        arguments=("-P", "-m", f"tests.gpu.{module}", *more),
        longest_s=longest_s,
        part=part,
        simulated=("--simulated", *(("--sizes", "16") if more else ())),
        double=("--small", *(("--sizes", "16") if more else ())),
        json="--json",
        tuned=bool(more),
    )


# In the order of what they tell. The limits of a part leave half a minute of ten for the installation of wheels.
STEPS: Final = {
    "questions": _items("questions", 540, 1),
    "tests": Step(arguments=(*_PYTEST, *_BROKER, "-k", "not hundred"), longest_s=300, part=2),
    "torch": Step(
        arguments=(*_PYTEST, "tests/gpu/test_torch_state.py"), longest_s=90, part=2, simulated=None, double=None
    ),
    "rounds": Step(arguments=(*_PYTEST, _BROKER[0], "-k", "hundred"), longest_s=80, part=2),
    "managed": Step(
        arguments=(*_PYTEST, "tests/gpu/test_torch_managed.py"), longest_s=70, part=2, simulated=None, double=None
    ),
    "phases": _phases(150, "512", "2048", "8192", "32768"),
    "small-pages": replace(
        _phases(40), arguments=("tests/gpu/bench.py", "--small-pages", "--times", "1", "--sizes", "2048")
    ),
    "offload": _items("offload_probe", 110, 3, "--sizes", "8192"),
    "measures": _items("measures", 130, 3),
    "spoilers": _items("spoilers", 110, 3),
}
PARTS: Final = sorted({step.part for step in STEPS.values()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and print the table; 0 if all of them succeeded, 1 if not, 2 for wrong arguments."""
    options = _options(arguments)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell ignores it for what it starts in the background, and so would the steps, which are ended by it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ends = time.monotonic() + options.within
    with _environment(options) as environment, _device_kept(environment):
        machine = _machine(environment)
        _write(folder / "results.json", json.dumps({**_read(folder / "results.json"), "machine": machine}) + "\n")
        lines, seen = [described(machine)], []
        for name in _chosen(options):
            left_s = int(ends - time.monotonic() - _KILL_S - _KILLED_S)  # a step that must be ended takes that besides
            longest_s = min(options.longest or STEPS[name].longest_s, left_s)
            line, tells = _step(name, folder, environment, longest_s, options)
            lines.append(line)
            seen += tells
            _write(folder / "summary.txt", "\n".join([*seen, "", *lines]).lstrip() + "\n")
    sys.stdout.write("\n" + (folder / "summary.txt").read_text(encoding="utf-8"))
    return 0 if all(line.startswith(_GOOD) for line in lines[1:]) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Everything that wants a GPU: questions, experiments, tests and benchmark."
    )
    parser.add_argument("folder", type=Path, help="where logs, results and the summary go")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install these first, without a network")
    parser.add_argument(
        "--part", action="append", type=int, choices=PARTS, help="the steps of one command of ten minutes"
    )
    parser.add_argument("--only", action="append", choices=STEPS, help="a step; may be repeated (default: all)")
    parser.add_argument("--longest", type=int, metavar="SECONDS", help="time limit of each step, instead of its own")
    parser.add_argument(
        "--within", type=int, default=24 * 3600, metavar="SECONDS", help="time limit of all of it together"
    )
    parser.add_argument(
        "--tune", action="store_true", help="as root: measure speeds with huge pages allowed; put back at the end"
    )
    without = parser.add_mutually_exclusive_group()
    without.add_argument("--simulated", action="store_true", help="try it all on a simulated device")
    without.add_argument("--double", action="store_true", help="try it all on a double of the driver")
    options = parser.parse_args(arguments)
    if options.wheels is not None and not list(options.wheels.glob("*.whl")):
        parser.error(f"there is no wheel in {options.wheels}; docs/gpu-tests.md says how to collect them")
    for name in ("longest", "within"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is a number of seconds from 1, got {value}")
    return options


def _machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the device, from tests/gpu/results.py in a separate process: a driver may hang."""
    simulated = environment["JUPYTER_GPU_HARDWARE"] == "simulated"
    ask = f"import json; from tests.gpu.results import machine; print(json.dumps(machine(simulated={simulated}, torch=False)))"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", ask],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"the driver has not answered within {_LOOK_S:g} s"}
    except ValueError:
        return {"error": done.stderr.strip()[-300:]}
    return found


def _chosen(options: argparse.Namespace) -> list[str]:
    """Return the steps that were asked for, in their order; all of them where none was."""
    asked = {*(options.only or ()), *(name for name, step in STEPS.items() if step.part in (options.part or ()))}
    return [name for name in STEPS if name in asked or not asked]


@contextmanager
def _environment(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The steps' environment: the checkout, and the wheels, come before installed packages."""
    with (
        tempfile.TemporaryDirectory(prefix="jgl-site-") as site,
        entry_points_installed(),
        _double(on=options.double) as double,
    ):
        if options.wheels is not None:
            Path(site).chmod(0o755)  # some questions are asked as another user
            wheels = sorted(str(wheel.absolute()) for wheel in options.wheels.glob("*.whl"))
            install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", site)
            subprocess.run([sys.executable, *install, *wheels], check=True)
        Path(site, "tests").mkdir(exist_ok=True)  # as above, for the steps
        Path(site, "tests", "__init__.py").write_text(f"__path__ = [{str(ROOT / 'tests')!r}]\n", encoding="utf-8")
        inherited = double.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        hardware = "simulated" if options.simulated else "double" if options.double else "1"
        yield {
            **os.environ,
            **double,
            "PYTHONPATH": os.pathsep.join([PYTHONPATH, site, *([inherited] if inherited else [])]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "JUPYTER_GPU_HARDWARE": hardware,
            **({"JUPYTER_GPU_SIMULATE": "1x512MiB"} if options.simulated else {}),
        }


@contextmanager
def _double(*, on: bool) -> Iterator[dict[str, str]]:
    """The environment of a simulated host whose driver is a double of NVIDIA's libraries; empty if it is not wanted."""
    if not on:
        yield {}
        return
    from tests.driver_double.double import Device, DriverDouble  # noqa: PLC0415 - it needs a compiler

    with tempfile.TemporaryDirectory(prefix="jgl-double-") as folder:
        Path(folder).chmod(0o755)  # some questions are asked as another user
        host = DriverDouble(Path(folder, "host"), devices=(Device(mib=_DOUBLE_MIB),))
        host.set(context_mib=_DOUBLE_CONTEXT_MIB)
        yield host.environment()


@contextmanager
def _device_kept(environment: Mapping[str, str]) -> Iterator[None]:
    """Keep NVML and the devices open for the block, as persistence mode would: a driver that nothing uses is unloaded."""
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.gpu.look", "--keep"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        keeper.kill()
        with suppress(subprocess.TimeoutExpired):
            keeper.communicate(timeout=_KILLED_S)


@contextmanager
def _tuned(*, on: bool) -> Iterator[None]:
    """Switch transparent huge pages on and allow reserved ones for the block; both settings are put back at its end. Raises OSError."""
    before: dict[Path, str] = {}
    try:
        if on:
            for path, value in ((_THP, "always"), (_HUGE_PAGES, str(_ENOUGH_HUGE_PAGES))):
                told = path.read_text().strip()
                before[path] = told.partition("[")[2].partition("]")[0] or told
                path.write_text(value)
        yield
    finally:
        for path, value in before.items():
            path.write_text(value)


_GOOD: Final = ("ok ", "not here ")


def _step(
    name: str, folder: Path, environment: Mapping[str, str], longest_s: int, options: argparse.Namespace
) -> tuple[str, list[str]]:
    """Run a step and return its line of the summary and the table of what it saw; the results go to results.json."""
    step = STEPS[name]
    besides = step.simulated if options.simulated else step.double if options.double else ()
    if besides is None:
        return f"not here {name}: needs torch on a GPU", []
    if longest_s < min(_LEAST_S, step.longest_s, options.longest or _LEAST_S):
        return f"not begun {name}: no time left of {options.within} s", []
    sys.stdout.write(f"{name}: at most {longest_s} s, log in {folder / name}.log\n")
    sys.stdout.flush()
    try:
        with driver_messages() as messages, _tuned(on=options.tune and step.tuned):
            line = _run(name, folder, environment, longest_s, besides)
    except OSError as error:
        line, messages = f"failed {name}: {error}", []  # of the log, or of a setting that may not be changed
    found = _read(folder / f"{name}.json")
    together = _read(folder / "results.json")
    if found:
        together[name] = found
    together.setdefault("steps", {})[name] = line
    together.setdefault("kernel_log", {})[name] = messages
    _write(folder / "results.json", json.dumps(together, indent=2) + "\n")
    (folder / f"{name}.json").unlink(missing_ok=True)
    if messages:
        line = f"{line}; the kernel logged {len(messages)} lines, the last: {messages[-1][-120:]}"
    return line, table(name, found)


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _run(name: str, folder: Path, environment: Mapping[str, str], longest_s: int, besides: Sequence[str]) -> str:
    """Run a step, and return its line of the summary."""
    step = STEPS[name]
    file = folder / f"{name}.json"
    results = (step.json, str(file)) if step.json else ()
    command = [sys.executable, *step.arguments, *besides, *results]
    file.unlink(missing_ok=True)  # an earlier run's are not this one's
    begun = time.monotonic()
    with (folder / f"{name}.log").open("wb") as log:
        # In a separate session, so that all of it can be ended.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "JUPYTER_GPU_RESULTS": str(file)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(longest_s)
            outcome = "ok" if status == 0 else f"failed (status {status})"
        except subprocess.TimeoutExpired:
            _end(process)
            outcome = f"not done within {longest_s} s"
        except BaseException:
            _end(process)
            raise
    line = f"{outcome} {name}, {time.monotonic() - begun:.0f} s"
    return line if outcome == "ok" else f"{line}: {_last_line(folder / f'{name}.log')}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step and what it started in its session: politely, so that results are written and brokers end, and then at once.

    What a driver keeps from ending is left behind: the next step must begin.
    """
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)
    for pid in _session(process.pid):  # items are separate groups
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(after_name[3]) == leader:
                found.append(int(folder.name))
    return found


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")


def _read(path: Path) -> dict[str, Any]:
    """Return the results; nothing where a step ended before there were any."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


if __name__ == "__main__":
    raise SystemExit(main())
