"""`jupyter gpu uninstall` removes all of a user's files, and nothing while a kernel has a lease."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from fractional_gpu.client import state_folder
from fractional_gpu.client.state_folder import make_state_folder
from fractional_gpu.commands import uninstall
from fractional_gpu.config.service import PACKAGE
from tests.commands.conftest import OwnBroker
from tests.support.world import World, new_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """An existing user of Jupyter: only our product's files may go. Other tests cover the machine's own folders."""
    monkeypatch.setattr(uninstall, "_TEMPORARY", (str(tmp_path),))
    monkeypatch.setattr(uninstall, "temporary_folder", lambda: tmp_path)
    monkeypatch.setattr(state_folder, "_VAR_TMP", tmp_path)
    for places in (
        "ENV_JUPYTER_PATH",
        "SYSTEM_JUPYTER_PATH",
    ):  # or kernelspecs of this environment and machine would go
        monkeypatch.setattr(f"jupyter_core.paths.{places}", [str(tmp_path / places)])
    with new_world() as made:
        made.environment.pop("JUPYTER_GPU_SOCKET")  # as for a user: the socket is in Jupyter's runtime folder
        made.socket = str(made.folder / "run" / "gpu" / "broker.sock")
        yield made


def everything(folder: Path) -> set[str]:
    """Return every path below the folder, in short form."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_nothing_is_left_of_a_broker_its_state_and_kernelspecs(world: World) -> None:
    theirs = world.folder / "data" / "kernels" / "mine" / "kernel.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text('{"argv": ["true"], "display_name": "Mine", "language": "none"}')
    world.configure("c.GPUBroker.idle_exit = 'never'\n")
    with patch.dict(os.environ, world.environment, clear=True):
        simulated = world.simulated_folder
    before = everything(world.folder)
    assert world.command("kernels", "install", "--user", "--fraction", "1/4").returncode == 0
    settings = world.folder / "config" / "lab" / "user-settings" / PACKAGE / "settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text("{}")
    world.start_broker()
    assert world.broker_pid() is not None
    assert simulated.is_dir()

    said = world.command("uninstall", "--dry-run", "--json")
    planned = json.loads(said.stdout)
    assert len(planned["would_remove"]) == 5, planned
    assert world.broker_pid() is not None, "a dry run ended the broker"

    said = world.command("uninstall", "--yes", "--json")
    assert said.returncode == 0, said.stderr
    told = json.loads(said.stdout)
    assert told["failed"] == []
    assert [Path(one["path"]).name for one in told["kept"]] == ["jupyter_gpu_config.py"]
    assert world.broker_pid() is None
    assert not simulated.exists()
    left = everything(world.folder) - before
    assert left <= {"config/lab", "config/lab/user-settings", "state"}, (
        left
    )  # JupyterLab's and the user's own folders, empty
    assert theirs.exists()


def test_nothing_is_removed_while_a_kernel_has_a_lease(world: World, broker: OwnBroker) -> None:
    broker.add("suspended", label="thesis.ipynb")
    world.install(250)
    with patch.object(uninstall, "_recorded_sockets", return_value=iter([broker.path])):
        said = world.command("uninstall", "--yes")
    assert said.returncode == 1
    assert "thesis.ipynb" in said.stderr
    assert "shut them down" in said.stderr
    assert len(list(world.kernels_dir.iterdir())) == 1


def test_without_a_terminal_it_says_what_to_do(world: World) -> None:
    said = world.command("uninstall")
    assert said.returncode == 1
    assert "--yes" in said.stderr
    assert "--dry-run" in said.stderr


def test_what_cannot_be_removed_is_named_and_the_rest_goes(world: World) -> None:
    world.install(250)
    with patch.dict(os.environ, world.environment, clear=True):
        state = make_state_folder(world.socket)
    real = shutil.rmtree

    def refuses(path: Path) -> None:
        if path == state.parent:
            raise PermissionError(13, "Permission denied")
        real(path)

    with patch("shutil.rmtree", refuses):
        said = world.command("uninstall", "--yes")
    assert said.returncode == 1
    assert f"could not remove {state.parent}: Permission denied" in said.stdout
    assert not list(world.kernels_dir.iterdir())


def test_a_link_in_the_place_of_a_folder_is_left_alone(world: World) -> None:
    precious = world.folder / "home" / "precious"
    precious.mkdir()
    (world.folder / "run" / "gpu").symlink_to(precious)
    (precious / "broker.log").write_text("mine")
    assert world.command("uninstall", "--yes").returncode == 0
    assert (precious / "broker.log").read_text() == "mine"
    assert stat.S_ISLNK((world.folder / "run" / "gpu").lstat().st_mode)
    (world.folder / "run" / "gpu").unlink()


@pytest.mark.parametrize(
    ("installer", "prefix", "command"),
    [
        ("pip\n", "/opt/venv", "-m pip uninstall jupyter-fractional-gpu"),
        ("", "/opt/venv", "-m pip uninstall jupyter-fractional-gpu"),
        ("uv", "/home/ada/.local/share/uv/tools/jupyter-fractional-gpu", "uv tool uninstall jupyter-fractional-gpu"),
        ("uv", "/opt/venv", "uv pip uninstall --python"),
        ("pip", "/home/ada/.local/pipx/venvs/jupyter-fractional-gpu", "pipx uninstall jupyter-fractional-gpu"),
        ("conda", "/opt/conda/envs/a", "conda remove --prefix /opt/conda/envs/a jupyter-fractional-gpu"),
    ],
)
def test_the_package_is_removed_by_what_installed_it(
    installer: str, prefix: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", prefix)
    with patch.object(uninstall, "distribution") as found:
        found.return_value.read_text.return_value = installer
        assert command in uninstall.package_command()


@pytest.mark.parametrize(("answer", "goes"), [("y", True), ("Yes ", True), ("", False), ("n", False)])
def test_it_asks_first(world: World, answer: str, *, goes: bool) -> None:
    world.install(250)
    with patch("sys.stdin") as stdin, patch("builtins.input", return_value=answer):
        stdin.isatty.return_value = True
        said = world.command("uninstall")
    assert said.returncode == 0, said.stderr
    assert bool(list(world.kernels_dir.iterdir())) is not goes
    assert ("Nothing was removed." in said.stdout) is not goes
