"""The install commands of README and docs, and how each is run with the artifacts, or why it is not.

A page is followed by one reader from top to bottom, in an environment that is active, in the folder with the wheel. Followed are the
blocks with an install command, those that tests/site does not run because they need an index, and commands in sentences. A command with
a program that is neither in `_RUN` nor in `CANNOT` is an error: say here how it is run.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from docs._site.installing import PACKAGE as WHEEL
from fractional_gpu import __version__
from tests.installs.story import Artifacts, Failure, Home, entries, run
from tests.site.blocks import blocks, commands, pages
from tests.support.paths import ROOT

__all__ = ["CANNOT", "INSTALLS", "follow", "install_commands", "pages_that_install", "why_not"]

_MANAGERS: Final = "pip3?|pipx|uvx?|conda|mamba|micromamba|pixi|poetry|npm|npx|yarn|apt|apt-get|dnf|yum|brew|snap|helm"
INSTALLS: Final = re.compile(
    rf"(?<![\w.-])({_MANAGERS}) +(-\S+ +)*[a-z]+ +(-\S+ +)*[^\s-]|(lab|server )extension [a-z]|--plugin |\buv venv\b"
)
"""A program that installs, what it does, and with what: `pip install` alone names a program in a sentence."""
_NAMED: Final = re.compile(rf"'?\./{re.escape(WHEEL)}(\[[\w,]+\])?'?")
"""The wheel alone in a sentence, as in "Install `'./NAME.whl[slurm]'`"."""
CANNOT: Final[Mapping[str, str]] = {
    r"conda (create|activate) ": "conda's index is needed; the form conda-recipe runs what follows in a prefix with conda's marks",
    r"dnf ": "Red Hat's packages are needed",
    r"tests/run setup|\. \.test-venv/": "it is what runs this: CI begins with it",
    r"(kubectl|helm) ": "a cluster is needed",
    r"curl -L https://tljh\.jupyter\.org/bootstrap\.py ": "root on a machine for TLJH is needed; the form tljh-plugin does the same",
    r"sudo (systemctl|rm|tljh-config|/opt/tljh/)": "root on a machine with TLJH is needed; the form tljh-plugin does the same",
    r"sudo ~/gpu/bin/jupyter-gpu setup-machine": "it changes the machine; tests/commands has its tests",
    r"sudo \.\.\./bin/pip install torch": "torch is never installed, and root on a machine with the service is needed",
    r"(cp|systemctl) ": "root and systemd are needed",
}
"""Which commands are not run here, and why."""
_RUN: Final = re.compile(r"(\S*/)?(pip|uv|npm|jupyter|python3? -m (pip|venv|ipykernel)) |(\. )?~/gpu/bin/activate")
_SHORTER: Final = ((r"jupyter lab$", "jupyter lab --version"), (r"jupyter gpu demo$", "jupyter gpu demo --check"))
"""Commands that serve a browser until Ctrl-C."""


def install_commands(page: Path) -> Iterator[str]:
    """Yield the page's commands, in their order."""
    found: list[tuple[int, str]] = []
    for block in blocks(page):
        if block.language == "bash" and (INSTALLS.search(block.text) or "the network" in block.reason):
            found += [(block.line, command) for command in commands(block.text)]
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for span in re.findall(r"`([^`]+)`", line):
            if _NAMED.fullmatch(span):
                found.append((number, f"pip install {span}"))
            elif INSTALLS.search(span):
                found.append((number, span))
    yield from (command for _, command in sorted(found, key=lambda one: one[0]))


def why_not(command: str) -> str:
    """Return why the command is not run here, or nothing. Raises Failure if this module does not know it."""
    for pattern, reason in CANNOT.items():
        if re.match(pattern, command):
            return reason
    for part in re.split(r" && ", command):
        if not _RUN.match(part):
            raise Failure(f"`{part}`: say in tests/installs/documents.py how this is run, or why it is not")
    return ""


def pages_that_install() -> dict[str, Sequence[str]]:
    """Return the commands of each page that has any."""
    found = {str(page.relative_to(ROOT)): list(install_commands(page)) for page in pages()}
    return {page: its for page, its in found.items() if its}


def follow(its: Sequence[str], built: Artifacts, folder: Path) -> str:
    """Run a page's commands as one reader does; return how many were run, and why the others were not. Raises Failure."""
    home, here = Home(folder / "user"), folder / "here"
    left_out = {command: why for command in its if (why := why_not(command))}
    followed = [command for command in its if command not in left_out]
    reasons = "".join(f"; not `{command}`: {why}" for command, why in left_out.items())
    if not followed:
        return f"no command{reasons}"
    reads_sources = any(re.search(r" '?\.(\[\w+\]'?)?( |$)", command) for command in followed)
    if reads_sources:
        built.unpack(folder / "source").rename(here)
    else:
        here.mkdir()
    shutil.copy(built.wheel, here)
    run([sys.executable, "-m", "venv", folder / "environment"], home.environment)
    reader = home.environment | {
        "PATH": f"{folder / 'environment' / 'bin'}{os.pathsep}{home.environment['PATH']}",
        "NPM_CONFIG_PREFIX": str(folder / "npm"), "PIP_YES": "1", "PIP_QUIET": "1", "UV_SYSTEM_CERTS": "1",
    }  # fmt: skip
    if followed[0].startswith("jupyter "):  # the page is for those who have it
        followed = [f"pip install './{WHEEL}[lab]'", *followed]
    script = _here("\n".join(["exec 2>&1", *followed]), folder)
    said = run(["bash", "-euxo", "pipefail", "-c", script], reader, cwd=here)
    if found := re.findall(r".*does not (?:provide|have) .*extra.*", said):  # pip and uv only warn of it
        raise Failure("\n".join(found))
    for program in (path for path in entries(folder) if path.name == "jupyter-gpu" and path.parent.name == "bin"):
        if __version__ not in (version := run([program, "--version"], reader)):
            raise Failure(f"{program} is version {version.strip()}, and what was built is {__version__}")
    return f"{len(followed)} commands{reasons}"


def _here(command: str, folder: Path) -> str:
    for pattern, shorter in _SHORTER:
        command = re.sub(pattern, shorter, command, flags=re.MULTILINE)
    return re.sub(r"(?<![\w.])/(opt|shared)/", rf"{folder}/\1/", command)
