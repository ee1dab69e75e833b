"""Another version's broker takes over living kernels, and the first version's takes them back."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fractional_gpu import __version__
from tests.support.paths import ROOT
from tests.support.stories import CHECK, fill
from tests.support.world import Server, World

pytestmark = pytest.mark.promise("upgrade")

NEXT = "0.99.0"


def next_version(world: World) -> Path:
    """A folder with the next version's package."""
    package = world.folder / NEXT / "fractional_gpu"
    shutil.copytree(ROOT / "provisioner" / "fractional_gpu", package)
    named = (package / "__init__.py").read_text()
    assert f'"{__version__}"' in named
    (package / "__init__.py").write_text(named.replace(f'"{__version__}"', f'"{NEXT}"'))
    return package.parent


def test_kernels_live_through_an_upgrade_and_a_rollback(world: World) -> None:
    place, first, second = world.folder / "installed", ROOT / "provisioner", next_version(world)
    place.symlink_to(first)
    world.environment["PYTHONPATH"] = os.pathsep.join([str(place), world.environment["PYTHONPATH"]])
    with Server(world) as server:
        notebooks = [server.start(name) for name in world.install(250, 500)]
        for seed, notebook in enumerate(notebooks):
            notebook.must(fill(seed, 4))
        for version, folder in ((NEXT, second), (__version__, first)):
            with world.client() as client:
                client.suspend(world.lease(notebooks[0].kernel_id).lease_id)
            place.unlink()
            place.symlink_to(folder)
            restart = [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "broker", "--restart"]
            subprocess.run(restart, env=world.environment, check=True)
            with world.client() as client:
                assert client.ping().version == version
            assert [world.lease(notebook.kernel_id).state for notebook in notebooks] == ["suspended", "resident"]
            for notebook in notebooks:
                assert notebook.must(CHECK).text == "intact\n"
