"""Nothing is decided by the wall clock, which anybody may set: every use of it is listed here, with what it is for.

A new use that only shows something, or dates it for people, is added below. One that decides needs another clock: `time.monotonic`, the
time since boot (`fractional_gpu.host.clock`), or, for a moment that survives a restart, `fractional_gpu.broker.clock`.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.promise("wall-clock")

PACKAGES = ("provisioner", "kernelext", "hub_spawner")
CLOCKS = {
    ("time", name)
    for name in (
        "time",
        "time_ns",
        "localtime",
        "gmtime",
        "ctime",
        "CLOCK_REALTIME",
        "CLOCK_REALTIME_COARSE",
        "CLOCK_TAI",
    )
} | {(kind, name) for kind in ("datetime", "date") for name in ("now", "utcnow", "today")}
FILE_TIMES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "st_atime", "st_atime_ns", "getmtime", "getctime"}
OWN = {"wall_ms"}

ALLOWED = {
    "hub_spawner/fractional_gpu_hub/engines/kubernetes_cluster.py": "for how long a server runs, to show",
    "hub_spawner/fractional_gpu_hub/engines/slurm.py": "whether a job's expected start is today, for a sentence",
    "hub_spawner/fractional_gpu_hub/engines/slurm_commands.py": "the form of a job's expected start, in a sentence",
    "hub_spawner/fractional_gpu_hub/service/cluster.py": "the age of what another machine has published, for a sentence",
    "hub_spawner/fractional_gpu_hub/engines/spawner.py": "the age of what another machine has published, for a sentence",
    "provisioner/fractional_gpu/broker/persistence/audit.py": "dates of lines and files; which files are older than the days that are kept",
    "provisioner/fractional_gpu/broker/broker.py": "dates of the ledger's lines",
    "provisioner/fractional_gpu/broker/clock.py": "the wall clock itself, for dates; the start of the deadlines' clock, once for each boot",
    "provisioner/fractional_gpu/broker/process/driver_start.py": "the time of the next attempt, in a sentence",
    "provisioner/fractional_gpu/broker/kernels/ending.py": "the time of an eviction, in a sentence",
    "provisioner/fractional_gpu/broker/persistence/ledger_writer.py": "dates of points",
    "provisioner/fractional_gpu/broker/kernels/iopub.py": "the date in a message's header, which nothing reads",
    "provisioner/fractional_gpu/broker/process/rescue.py": "dates of the ledger's lines",
    "provisioner/fractional_gpu/broker/process/run.py": "which ended leases are older than the 90 days for which they are remembered",
    "provisioner/fractional_gpu/broker/seats/offers.py": "an administrator's opening hours are hours of the wall clock",
    "provisioner/fractional_gpu/broker/seats/rules.py": "as above",
    "provisioner/fractional_gpu/broker/services/revocation_notice.py": "a cloud gives the time of a revocation as a time of day",
    "provisioner/fractional_gpu/broker/seats/seats.py": "as above, and dates of seats",
    "provisioner/fractional_gpu/broker/api/lease_service.py": "dates of leases",
    "provisioner/fractional_gpu/broker/monitoring/watchdog.py": "the date of a line of the log",
    "provisioner/fractional_gpu/engines/agent.py": "the date in a node's summary, by which its readers know an old one",
    "provisioner/fractional_gpu/engines/accounting.py": "which hours of the meter a job's figures may lie in",
    "provisioner/fractional_gpu/commands/node/node.py": "dates of lines of the log",
    "provisioner/fractional_gpu/commands/audit.py": "what to show",
    "provisioner/fractional_gpu/commands/budget.py": "what to show, and until when an addition lasts: an administrator's date",
    "provisioner/fractional_gpu/commands/claim.py": "what to show",
    "kernelext/fractional_gpu_kernel/server/app.py": "the last activity that Jupyter keeps for idle cullers",
    "provisioner/fractional_gpu/commands/lease_commands.py": "what to show",
    "provisioner/fractional_gpu/commands/logs.py": "what to show",
    "provisioner/fractional_gpu/broker/accounting/budgets.py": "budgets run over days, weeks and months of the calendar",
    "provisioner/fractional_gpu/broker/accounting/metering.py": "which hour a stretch of time is booked in; what to show",
    "provisioner/fractional_gpu/broker/api/account_routes.py": "what to show: today and this month",
    "provisioner/fractional_gpu/commands/report.py": "what to show: which days `this-month` and its like are",
    "provisioner/fractional_gpu/core/metering/meter.py": "which hour a stretch of time is booked in, which a bill and its prices go by",
    "provisioner/fractional_gpu/gpu/simulated/load.py": "as in the next one",
    "provisioner/fractional_gpu/gpu/simulated/monitor.py": "no date: a file's time of change holds the time since boot",
    "provisioner/fractional_gpu/host/clock.py": "turns a driver's stamps into the time since boot, and notices when the clock was set",
    "provisioner/fractional_gpu/jupyter/kernel_command.py": "no date: whether an interpreter is the same file as before",
    "provisioner/fractional_gpu/ledger/ledger.py": "a date in the name of a file that is set aside",
    "hub_spawner/fractional_gpu_hub/service/usage.py": "which month a page is of",
    "provisioner/fractional_gpu/reports/chargeback.py": "no clock: the text of a moment that is given",
    "provisioner/fractional_gpu/reports/periods.py": "as above",
    "provisioner/fractional_gpu/reports/sums.py": "as above",
    "kernelext/fractional_gpu_kernel/display/chart.py": "what to show",
    "kernelext/fractional_gpu_kernel/display/views.py": "what to show",
}


def uses(tree: ast.Module) -> Iterator[str]:
    """Yield what of the wall clock a module names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if (owner, node.attr) in CLOCKS or node.attr in FILE_TIMES | OWN:
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (one.name for one in node.names if (node.module, one.name) in CLOCKS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OWN:
            yield node.func.id
        elif isinstance(node, ast.Name) and node.id in OWN and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Call) and _is_strftime_of_now(node):
            yield "strftime"


def _is_strftime_of_now(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "strftime" and len(call.args) == 1


def test_every_use_of_the_wall_clock_is_known_and_decides_nothing() -> None:
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if named := set(uses(ast.parse(file.read_bytes()))):
                found[str(file.relative_to(ROOT))] = named
    new = {file: named for file, named in found.items() if file not in ALLOWED}
    assert new == {}, "a use of the wall clock that is not listed: see above"
    assert set(ALLOWED) <= set(found), "listed, and not there any more"


def test_the_search_finds_every_way_to_read_it() -> None:
    for source in (
        "import time\ntime.time()",
        "import time\nclock = time.time_ns",
        "from time import time",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime\ndatetime.now(UTC)",
        "path.stat().st_mtime < x",
        "import time\ntime.clock_gettime(time.CLOCK_REALTIME)",
        "import time\ntime.strftime('%H')",
        "wall_ms()",
        "partial(f, wall_ms)",
    ):
        assert list(uses(ast.parse(source))), source
    assert not list(uses(ast.parse("import time\ntime.monotonic()\ntime.clock_gettime_ns(time.CLOCK_BOOTTIME)")))
