"""Every failpoint that there is, read from the sources: what no story reaches is not tested."""

import ast
import re
from pathlib import Path

import fractional_gpu.broker.api.routes
from fractional_gpu.core import events
from fractional_gpu.core.events import Event
from fractional_gpu.protocol.routes import ROUTES
from tests.support.paths import INJECTED

__all__ = ["UNTOLD", "known_points", "plain"]

_BROKER = Path(fractional_gpu.broker.api.routes.__file__).parent
_INJECTED = INJECTED / "injections.py"
_WRITE = re.compile(r"(?:submit|run)\(\s*partial\(\s*(?:[\w.]*\.)?ledger\.(\w+)")

UNTOLD = {
    "event.HostPressureSeen": "needs a control group that is short of memory; tests/broker/monitoring/test_host_memory.py",
    "event.Checkpointable": "needs managed memory, which the simulated device has not; tests/e2e/test_managed.py",
}
"""Points that no story reaches, and why that is so."""


def plain(point: str) -> str:
    """A point's name without its moment and its lease's state."""
    name = point.rpartition(".")[0]
    return name.partition("@")[0]


def known_points() -> set[str]:
    """Return all names, as `plain` gives them, without the omitted ones."""
    writes = {name for file in _BROKER.glob("*.py") for name in _WRITE.findall(file.read_text())}
    kinds = [one for one in vars(events).values() if isinstance(one, type) and issubclass(one, Event)]
    return {
        *(f"ledger.{name}" for name in writes),
        *(f"event.{kind.__name__}" for kind in kinds if not kind.__subclasses__()),
        *(f"api.{route.name}" for route in ROUTES),
        *_injected(),
    } - UNTOLD.keys()


def _injected() -> set[str]:
    for node in ast.parse(_INJECTED.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "POINTS" and node.value is not None:
            found: dict[str, tuple[str, tuple[str, ...]]] = ast.literal_eval(node.value)
            return {f"{who}.{name}" for who, names in found.values() for name in names}
    raise AssertionError(f"{_INJECTED} has no POINTS")
