"""What holds for every test: what the ordinary run leaves out, who runs what when it has several processes, and interrupts that work.

tests/gpu needs a GPU and has its own command: docs/gpu-tests.md. What needs a browser or builds something is for `tests/run release`, which
CI runs after the suite; a file that is named is always run.
"""

import gc
import os
import re
import runpy
import signal
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from fractional_gpu.client.discovery import IN_WORKLOAD
from fractional_gpu.host.workload import own_workload
from tests.support.paths import INJECTED, QUICK, RELEASE_ONLY, ROOT

collect_ignore = [] if os.environ.get("JUPYTER_GPU_HARDWARE") else ["gpu"]
if not os.environ.get("JUPYTER_GPU_ALL_LOOKS"):
    collect_ignore += [str(ROOT / file) for files in RELEASE_ONLY.values() for file in files]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it starts in the background, and so would every process that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests start some two thousand interpreters: without a cache each of them would compile the product again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Simulated hardware has faults, in this process and in those that get its environment.
runpy.run_path(str(INJECTED / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INJECTED), str(QUICK), os.environ.get("PYTHONPATH"))))

if own_workload(os.environ):
    # A machine that runs the tests as a job or in a pod: brokers start automatically there as elsewhere.
    os.environ[IN_WORKLOAD] = "1"


@pytest.fixture(scope="session", autouse=True)
def _own_state() -> Iterator[None]:
    """Brokers that the tests start in this process, or give its environment, keep their state in no folder of the user's."""
    with tempfile.TemporaryDirectory(prefix="jfg-state-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", folder)
        yield


# -- what tests share --------------------------------------------------------------------------------------------------------

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    return report


@pytest.fixture
def has_failed(request: pytest.FixtureRequest) -> Callable[[], bool]:
    """Whether the test has failed so far: what it shared is not used again then."""
    return lambda: request.node.stash.get(_FAILED, False)


# -- several processes (pytest -n) -----------------------------------------------------------------------------------------

WAITING = ("hub", "e2e")
"""Tests of these rooms wait for processes more than they compute. Here the next test goes to the next process, except where a file's
tests share something; elsewhere the next file does."""
_TESTS = Path(__file__).parent
_SHARES = re.compile(r'\(scope="(class|module)"')


def room(nodeid: str) -> str:
    """Return the folder of `tests` that a test is in."""
    return Path(nodeid.partition("::")[0]).parts[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files whose tests compute over those whose tests wait: so the processors have work while tests wait.

    The last tenth is of files that compute, and of rooms whose files are short: no process is left alone with a long one at the end.
    """
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    rooms = {path: path.relative_to(_TESTS).parts[0] for path in files}
    waiting = sorted((path for path in files if rooms[path] in WAITING), key=lambda path: WAITING.index(rooms[path]))
    computing = [path for path in reversed(files) if rooms[path] not in WAITING]  # core, broker and client come last
    places = {path: 0.9 * at / len(waiting) for at, path in enumerate(waiting)}
    places |= {path: at / len(computing) for at, path in enumerate(computing)}
    items[:] = [item for path in sorted(places, key=places.__getitem__) for item in files[path]]


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A process that is free takes the next test, or the next file, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if room(nodeid) in WAITING and not _shares(self.config.rootpath / file) else file


@cache
def _shares(file: Path) -> bool:
    return _SHARES.search(file.read_text()) is not None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Schedule as above, unless another way was asked for."""
    if config.getvalue("dist") != "load":
        return None
    config.option.loadscopereorder = False
    return Scheduling(config, log)


# Collecting makes some million objects that all stay: the garbage collector would look at them again and again, in every process.


def pytest_sessionstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# -- the end ---------------------------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say for each room how many seconds its tests took, all processes together."""
    reports = [
        report for kind in terminalreporter.stats.values() for report in kind if isinstance(report, pytest.TestReport)
    ]
    seconds, tests = defaultdict[str, float](float), Counter[str]()
    for report in reports:
        seconds[room(report.nodeid)] += report.duration
        tests[room(report.nodeid)] += report.when == "call"
    if len(seconds) > 1:
        terminalreporter.section("seconds of each room")
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{spent:8.1f} s  {tests[name]:5} tests  {name}")


# A machine that pauses for a second says nothing about a test. More examples of each property: `tests/run examples`.
settings.register_profile(
    "shared machine",
    max_examples=int(os.environ.get("JUPYTER_GPU_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared machine")
