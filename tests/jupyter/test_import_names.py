"""Next to a user's own `provisioner`, `kernelext` and `hub_spawner`, notebooks import the user's modules and kernels start.

Real programs run in a folder that has such modules, or with it on `PYTHONPATH`, with and without our provisioner as the default one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest

from fractional_gpu.jupyter.kernelspecs import PROVISIONER_NAME
from tests.support.paths import NO_DEBUGPY, QUICK, SOURCES
from tests.support.world import DEADLINE_S, Server, World, new_world

pytestmark = pytest.mark.promise("imports")

MODULES = ("provisioner/__init__.py", "kernelext.py", "hub_spawner/__init__.py")
LOOK = """
import json, os, sys
import hub_spawner, kernelext, provisioner
print(json.dumps({
    "theirs": [module.owner for module in (provisioner, kernelext, hub_spawner)],
    "gated": "JUPYTER_GPU_LEASE" in os.environ and "fractional_gpu_kernel" in sys.modules,
    "path": sys.path,
    "arguments": [word for word in sys.argv if not word.endswith(".json")],
    "safe_path": sys.flags.safe_path,
}))
"""
SCRIPT = """
import hub_spawner, kernelext, provisioner
from jupyter_client.manager import start_new_kernel

assert [module.owner for module in (provisioner, kernelext, hub_spawner)] == ["user"] * 3
manager, client = start_new_kernel(kernel_name=NAME)
client.execute_interactive(LOOK, timeout=60)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@dataclass
class Place:
    world: World
    cwd: Path
    default: bool
    gpu: str
    _stack: ExitStack
    _server: list[Server] = field(default_factory=list)

    @property
    def server(self) -> Server:
        if not self._server:
            lab = {"jupyterlab": True, "jupyter_lsp": False, "jupyter_server_terminals": False, "notebook_shim": False}
            self._server.append(self._stack.enter_context(Server(self.world, extensions=lab, cwd=self.cwd)))
        return self._server[0]

    def run(self, *arguments: str) -> str:
        command, environment = [sys.executable, *arguments], self.world.environment
        done = subprocess.run(
            command, env=environment, cwd=self.cwd, capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with new_world() as made:
        for name in MODULES:
            (made.notebooks / name).parent.mkdir(exist_ok=True)
            (made.notebooks / name).write_text("owner = 'user'")
        yield made


def places(*names: str) -> pytest.MarkDecorator:
    """Run a test in these places."""
    return pytest.mark.parametrize("place", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, world: World) -> Iterator[Place]:
    where, provisioner = request.param.split("-")
    beside, default = where == "beside", provisioner == "default"
    elsewhere = world.folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    before = dict(world.environment)
    world.environment["PYTHONPATH"] = os.pathsep.join(
        map(str, [*([] if beside else [world.notebooks]), *SOURCES, QUICK, NO_DEBUGPY])
    )
    if default:
        world.environment["JUPYTER_DEFAULT_PROVISIONER_NAME"] = PROVISIONER_NAME
    (gpu,) = world.install(125)
    with ExitStack() as stack:
        yield Place(world, world.notebooks if beside else elsewhere, default, gpu, stack)
    world.environment.clear()
    world.environment.update(before)


def looked(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


@places("beside-named")
def test_a_script_imports_its_own_modules_and_starts_kernels(place: Place) -> None:
    name = "python3" if place.default else place.gpu
    script = place.world.notebooks / "script.py"
    script.write_text(f"NAME, LOOK = {name!r}, {LOOK!r}\n{SCRIPT}")
    found = looked(place.run(str(script)))
    assert (found["theirs"], found["gated"]) == (["user"] * 3, True)


@places("PYTHONPATH-named")
def test_nbconvert_runs_a_notebook_that_imports_its_own_modules(place: Place) -> None:
    notebook = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    notebook.cells = [nbformat.v4.new_code_cell(LOOK)]  # type: ignore[no-untyped-call]
    file = place.cwd / "notebook.ipynb"
    nbformat.write(notebook, file)  # type: ignore[no-untyped-call]
    name = "python3" if place.default else place.gpu
    options = ("--to", "notebook", "--execute", "--stdout", f"--ExecutePreprocessor.kernel_name={name}")
    done = json.loads(place.run("-m", "nbconvert", *options, str(file)))
    found = looked("".join(done["cells"][0]["outputs"][0]["text"]))
    assert (found["theirs"], found["gated"]) == (["user"] * 3, True)


@places("beside-default")
def test_a_kernel_of_jupyterlab_has_the_path_arguments_and_flags_of_the_local_provisioner(place: Place) -> None:
    command = json.loads((place.world.kernels_dir / place.gpu / "kernel.json").read_text())["argv"]
    folder = place.world.kernels_dir / "local"
    folder.mkdir(exist_ok=True)
    stanza = {"kernel_provisioner": {"provisioner_name": "local-provisioner"}}
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "local", "metadata": stanza}))
    found = {name: looked(place.server.start(name).must(LOOK).text) for name in ("local", place.gpu, "python3")}
    local = found["local"]
    assert (local["theirs"], local["gated"], local["safe_path"]) == (["user"] * 3, False, False)
    assert local["arguments"][1:] == ["-f"]
    assert found[place.gpu] == {**local, "gated": True}
    assert found["python3"] == {**local, "gated": True}
