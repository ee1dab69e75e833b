"""How many of our files and calls three common ways pass through: a launch, a cell on a suspended kernel, a seat.

    python tests/benchmarks/ways.py [--json FILE] [--files]

All processes are counted, from the request to its answer: server, kernel, broker, hub (`tests/support/traced`). Periodic work of the broker
is counted, too, so figures vary a little from run to run. The broker of a seat is not counted: it is a service of
the hub, which passes the trace's variables on to its users' servers only. A call is one entry into a function of ours, generators
and coroutines resumed included; the import of a package's face is none.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_HERE))

from tests.support.hub import new_hub  # noqa: E402 - this checkout's
from tests.support.world import Server, World, new_world, until  # noqa: E402 - as above


class Trace:
    """Raise the flag for one way, and return what was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "flag").write_bytes(b"\0")

    def environment(self, inherited: str) -> dict[str, str]:
        """Return the environment of counted processes."""
        traced = Path(__file__).parents[1] / "support" / "traced"
        return {
            "JUPYTER_GPU_TRACE": str(self.folder),
            "JUPYTER_GPU_TRACE_ROOT": str(_HERE),
            "PYTHONPATH": os.pathsep.join((str(traced), inherited)),
        }

    def during(self, way: Callable[[], object]) -> Counter[str]:
        """Run the way; return the calls by "file:function"."""
        for file in self.folder.glob("*.json"):
            file.unlink()
        self._turn_flag()
        way()
        counting = {file.stem for file in self.folder.glob("*.counts")}
        self._turn_flag()
        until(lambda: self._wrote(counting), "each process has written what it counted")
        found: Counter[str] = Counter()
        for file in self.folder.glob("*.json"):
            calls = json.loads(file.read_text())["calls"]
            found.update({name: count for name, count in calls.items() if not name.endswith("/__init__.py:<module>")})
        return found

    def _wrote(self, counting: set[str]) -> bool:
        living = {pid for pid in counting if Path("/proc", pid).exists()}
        return living <= {file.stem.partition("-")[0] for file in self.folder.glob("*.json")}

    def _turn_flag(self) -> None:
        """Make the flag odd or even: a number, so that a process that is late still sees that there was a way."""
        with (self.folder / "flag").open("r+b") as file:
            (value,) = file.read(1)
            file.seek(0)
            file.write(bytes([(value + 1) % 256]))


def measure(folder: Path) -> dict[str, Counter[str]]:
    """Return the calls of each way."""
    found: dict[str, Counter[str]] = {}
    with new_world("1x1GiB") as world:
        trace = Trace(folder)
        world.environment |= trace.environment(world.environment["PYTHONPATH"])
        (name,) = world.install(250)
        with Server(world) as server:
            notebook = server.start(name)
            notebook.must("import sys; x = 1")
            found["launch"] = trace.during(lambda: server.start(name).must("1"))
            found["cell on a suspended kernel"] = _on_a_suspended(world, server, name, trace)
    with new_world("1x1GiB") as world:
        world.environment |= trace.environment(world.environment["PYTHONPATH"])
        kept = (
            "JUPYTER_PATH",
            "JUPYTER_DATA_DIR",
            "PYTHONPATH",
            "IPYTHONDIR",
            "JUPYTER_GPU_TRACE",
            "JUPYTER_GPU_TRACE_ROOT",
        )
        environment = {key: world.environment[key] for key in kept}
        with new_hub(world, environment=environment) as hub:
            hub.server("ada")
            found["seat"] = trace.during(lambda: hub.server("bob"))
    return found


def _on_a_suspended(world: World, server: Server, name: str, trace: Trace) -> Counter[str]:
    notebook = server.start(name)
    module = next(
        folder
        for folder in ("fractional_gpu", "provisioner")
        if (_HERE / "provisioner" / folder).is_dir() or folder == "provisioner"
    )
    notebook.must(f"from {module}.gpu.simulated import cuda; held = cuda.allocate(64 << 20)")
    with world.client() as client:
        client.suspend(world.lease(notebook.kernel_id).lease_id)
    world.await_state(notebook.kernel_id, "suspended")
    return trace.during(lambda: notebook.must("1"))


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write each way's calls by file and function there")
    parser.add_argument("--files", action="store_true", help="print each way's files, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jgl-ways-") as folder:
        found = measure(Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    print(f"{'way':28} {'files':>6} {'functions':>10} {'calls':>8}")
    for way, calls in found.items():
        files = Counter[str]()
        for name, count in calls.items():
            files[name.partition(":")[0]] += count
        print(f"{way:28} {len(files):6} {len(calls):10} {calls.total():8}")
        if options.files:
            for file, count in sorted(files.items()):
                print(f"    {count:6}  {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
