"""Tests on a real GPU: JUPYTER_GPU_HARDWARE=1 python -m pytest tests/gpu (see docs/gpu-tests.md).

With JUPYTER_GPU_HARDWARE=simulated the flows that need no torch run on a simulated device: it tests the tests. So does `double`, in the
environment of a double of the driver.
"""

import os
from collections.abc import Callable, Generator, Iterator

import pytest

from tests.gpu.installed import entry_points_installed
from tests.gpu.kernels import close_event_loop
from tests.gpu.lab import Lab, open_lab
from tests.gpu.results import Results

MODE = os.environ.get("JUPYTER_GPU_HARDWARE", "")
SIMULATED = MODE == "simulated"

LAST = "test_torch_managed.py"  # a driver's behaviour there is unknown: it must not spoil the others
# What a kernel without a framework, on a double that tells no samples of work, cannot show.
NOT_ON_A_DOUBLE = (
    "test_a_kernel_gets_its_cap_and_no_more_and_its_neighbour_notices_nothing",
    "test_a_thread_that_computes_keeps_its_kernel_on_the_device",
)

collect_ignore_glob = [] if MODE == "1" else ["test_torch_*.py"]

_results = pytest.StashKey[Results]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if MODE not in ("1", "simulated", "double"):
        raise pytest.UsageError(
            f"tests/gpu needs a GPU: set JUPYTER_GPU_HARDWARE=1 to use the first one of this machine (given: {MODE!r}), "
            "or JUPYTER_GPU_HARDWARE=simulated to try the tests themselves"
        )
    if MODE == "double":
        left_out = [item for item in items if item.name in NOT_ON_A_DOUBLE]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.path.name == LAST)
    if not config.option.collectonly:
        try:
            config.stash[_results] = Results(simulated=SIMULATED, torch=MODE == "1")
        except RuntimeError as error:
            raise pytest.UsageError(f"tests/gpu cannot run: {error}") from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    lab = getattr(item, "funcargs", {}).get("lab")
    if report.failed and isinstance(lab, Lab) and lab.folder.exists():
        report.sections.extend((f"{name} of the test's broker", text) for name, text in lab.logs().items())
    results = item.config.stash.get(_results, None)
    if results is not None and (report.when == "call" or report.failed):
        results.end(item.name, report.outcome, report.duration)
        results.write()  # a run that is stopped half way has not been for nothing
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = config.stash.get(_results, None)
    if results is None:
        return
    where = {"simulated": " (on a simulated device)", "double": " (on a double of the driver)"}
    terminalreporter.section("what was seen" + where.get(MODE, ""))
    for name, one in results.content["tests"].items():
        for what, value in one["saw"].items():
            terminalreporter.write_line(f"{name}: {what} = {value}")
    path = results.write()
    if path is not None:
        terminalreporter.write_line(f"written to {path}")


@pytest.fixture(scope="session", autouse=True)
def installed() -> Iterator[None]:
    with entry_points_installed():
        yield


@pytest.fixture
def lab() -> Iterator[Lab]:
    with open_lab(simulated=SIMULATED) as opened:
        try:
            yield opened
        finally:
            close_event_loop()


@pytest.fixture
def saw(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Note something for the results file."""
    results = request.config.stash[_results]

    def note(name: str, value: object) -> None:
        results.note(request.node.name, name, value)

    return note
