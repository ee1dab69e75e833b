"""What is committed is what the sources give, and what an installation puts where JupyterLab looks, without node."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator

import pytest

from fractional_gpu import __version__
from fractional_gpu.core.model import LeaseState
from fractional_gpu.protocol.names import STATES
from tests.labextension.rebuild import DIGEST, PREBUILT, digest, sources
from tests.support.paths import ROOT

SHARE = "data/share/jupyter/labextensions/jupyter-fractional-gpu/"


def test_the_built_files_were_built_from_these_sources() -> None:
    assert DIGEST.read_text().strip() == digest(), "run `tests/run labextension` and commit the result"


def test_the_built_files_are_of_this_version_and_complete() -> None:
    package = json.loads((PREBUILT / "package.json").read_text())
    assert (package["name"], package["version"]) == ("jupyter-fractional-gpu", __version__)
    entry = PREBUILT / package["jupyterlab"]["_build"]["load"]
    hashes = re.findall(r'"?(\d+)"?:"([0-9a-f]{20})"', entry.read_text())
    assert hashes
    for number, content_hash in hashes:
        assert (PREBUILT / "static" / f"{number}.{content_hash}.js").is_file()


def test_colours_come_from_the_theme_alone() -> None:
    (style,) = [path.read_text() for path in sources() if path.suffix == ".css"]
    assert re.findall(r"#[0-9a-f]{3,8}\b|rgba?\(|hsla?\(", style, re.IGNORECASE) == []


def test_the_states_of_a_lease_have_the_same_words_everywhere() -> None:
    (words,) = [path.read_text() for path in sources() if path.name == "words.ts"]
    table = words.partition("const STATES")[2].partition("};")[0]
    written = dict(re.findall(r"^  (\w+): \['\w+', '([^']+)'\]", table, re.MULTILINE))
    assert {"resident": "on the GPU", **written} == {state: words.words for state, words in STATES.items()}
    assert set(STATES) == {state.value for state in LeaseState}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as opened:
        yield opened


def test_a_wheel_brings_both_extensions_to_their_places(wheel: zipfile.ZipFile) -> None:
    data = {name.partition(".data/")[2] for name in wheel.namelist() if ".data/" in name}
    built = {str(path.relative_to(PREBUILT)) for path in PREBUILT.rglob("*") if path.is_file()}
    assert {name.removeprefix(SHARE) for name in data if name.startswith(SHARE)} == built | {"install.json"}
    assert "data/etc/jupyter/jupyter_server_config.d/jupyter-fractional-gpu.json" in data
    assert "fractional_gpu_kernel/server/app.py" in wheel.namelist()
    assert [name for name in wheel.namelist() if "/src/" in name or name.endswith((".ts", ".mjs", "-lock.json"))] == []
