"""Where the documentation's snippets are run: one world with simulated GPUs, a program on a share of one, and the files that pages name.

Placeholders of the pages become real values (`LEASE`, the socket of a service of the machine), and simulations get fewer users.
Commands of `jupyter gpu` run in this process where no shell is needed: their imports take longer than most commands.
"""

import ast
import configparser
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import yaml
from traitlets.config import Config
from traitlets.utils.importstring import import_item

from fractional_gpu.commands.main import COMMANDS, subcommand
from fractional_gpu.config import load
from fractional_gpu.jupyter.kernel_command import parse_kernel_config
from tests.driver_double.double import Device, DriverDouble
from tests.site.blocks import Block, commands
from tests.support.outside import as_installed
from tests.support.paths import ROOT
from tests.support.world import DEADLINE_S, Notebook, Server, World, until

__all__ = ["Desk", "check_arguments", "open_desk", "says"]

_UNENDING: Final = re.compile(r"--follow|--watch|^jupyter (gpu )?lab\b")
_SERVES: Final = re.compile(r"http://localhost:(\d+)/")
"""What a Jupyter server prints before it listens. Other commands without an end have begun with their first line."""
_ENDED: Final = (0, 130, -signal.SIGINT, -signal.SIGTERM)
_SHELL: Final = re.compile(r"[|<>$;`]|&&|^(export|eval|cd) |^[A-Z_]+=")
_COMMENT: Final = re.compile(r"\s#.*")
_SMALLER: Final = (
    (r"--users \d+", "--users 3"),
    (r"\d+x\(8x80GiB\)", "1x(8x80GiB)"),
    (r"--memory \d+GiB", "--memory 20MiB"),
    (r"--days 7 --weekends --weekend-users 10", "--days 1"),
    (r"lesson\.py 60", "lesson.py 5"),
    (r"--joint-starts 40", "--joint-starts 2"),
    (r"--urgent-users 20", "--urgent-users 1"),
)
"""What the simulator is asked for in the pages takes minutes. The same commands with fewer users take a moment."""
_SERVICE_SOCKET: Final = "/run/jupyter-gpu/broker.sock"
_PROGRAMS: Final = {
    "train.py": "import sys\nprint('trained', sys.argv[1:])\n",
    "probe.py": "print('found')\n",
    "program.py": "from cuda.bindings import driver\nprint(driver.cuInit(0))\n",
}
_DOES_NOTHING: Final = ("vllm",)
"""Programs that pages run on a share, and that are not installed here: only the share is tested."""
_KEPT: Final = "import signal\nsignal.sigwait({signal.SIGTERM})\n"


_POLICY: Final = "jupyter_gpu_config.py"
_TEACHING_LAB: Final = "docs/teaching.md"  # the page with the example's policy


class Desk:
    """Runs blocks. What Python blocks of a page define stays for the page's later ones."""

    def __init__(self, world: World, shims: Path) -> None:
        self.world = world
        self._shims = shims
        self._names: dict[str, dict[str, Any]] = {}
        self._said: dict[tuple[str, ...], str] = {}
        """What Jupyter servers and the doctor said, by their command: several pages have the same one, and it would say the same."""
        self._program: subprocess.Popen[bytes] | None = None
        self._has_acted = False
        self._server: Server | None = None
        self._notebook: Notebook | None = None

    # -- what is there ---------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.world.notebooks

    def open_page(self, page: str) -> None:
        for name, text in _PROGRAMS.items():
            (self.folder / name).write_text(text)
        shutil.copyfile(ROOT / "examples" / "device.py", self.folder / "device.py")
        for name in ("lesson.py", _POLICY):
            shutil.copyfile(ROOT / "examples" / "jupyterhub" / name, self.folder / name)
        if page != _TEACHING_LAB:
            (self.folder / _POLICY).write_text("c.GPUBroker.pools = {'default': {}}\n")
        (self.folder / "other.py").write_text("c.GPUBroker.pools = {'default': {'idle_after': '1m'}}\n")

    def prepare(self) -> None:
        if self.world.broker_pid() is None:
            self.world.start_broker()
        if self._program is None or self._program.poll() is not None:
            run = (sys.executable, "-P", "-m", "fractional_gpu.commands.main", "run", "--name", "train.ipynb")
            self._program = subprocess.Popen(
                [*run, "--", sys.executable, "-c", _KEPT], env=self.world.environment, stdin=subprocess.DEVNULL
            )
            until(
                lambda: any(lease.spec.label == "train.ipynb" for lease in self.world.status().leases), "it has a lease"
            )
        if not self._has_acted:  # for what shows acts
            for act in ("drain", "undrain"):
                self.world.command(act, "1")
            self._has_acted = True

    def notebook(self) -> Notebook:
        if self._notebook is None:
            (name,) = self.world.install(250)
            self._server = Server(self.world)
            self._notebook = self._server.start(name)
            self._notebook.must("import device\ngpu = device.open()")
        return self._notebook

    def _compute(self) -> None:
        if not self._has_recorded():
            self.notebook().must("data = gpu.fill(seed=1, size=2**24)")
            kernel = self.notebook().kernel_id
            until(lambda: not self.world.lease(kernel).busy, "the broker has seen the cell's end")
            pid = self.world.broker_pid()
            assert pid is not None
            self.world.end(pid, signal.SIGTERM)  # it writes what it has
            self.world.start_broker()
            assert self._has_recorded()

    def _has_recorded(self) -> bool:
        return self.world.command("simulate", "--from-ledger", "--devices", "1x80GiB").returncode == 0

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
        if self._program is not None:
            self._program.terminate()
            self._program.wait(DEADLINE_S)

    # -- running -----------------------------------------------------------------------------------------------------------

    def run(self, block: Block) -> str:
        text = block.text.replace(_SERVICE_SOCKET, self.world.socket)
        ways = {
            "bash": self._bash,
            "python": self._python,
            "ipython": self._ipython,
            "json": _check_json,
            "yaml": self._check_yaml,
            "toml": _check_toml,
            "ini": _check_unit,
        }
        return ways[block.language](block, text) or ""

    def _bash(self, _: Block, text: str) -> str:
        lease = next(one.lease_id for one in self.world.status().leases if one.spec.label == "train.ipynb")
        text = re.sub(r"\bLEASE\b", lease, text)
        for long, short in _SMALLER:
            text = re.sub(long, short, text)
        if "<<" in text:
            return self._shell(text)
        printed = [
            self._unending(line)
            if _UNENDING.search(line)
            else self._shell(line)
            if _SHELL.search(_COMMENT.sub("", line))
            else self._words(line)
            for line in commands(text)
        ]
        return "".join(printed)

    def _words(self, line: str) -> str:
        words = shlex.split(line, comments=True)
        if words[:2] != ["jupyter", "gpu"] or words[2] in ("run", "measure"):
            return self._shell(line)
        if tuple(words) in self._said:
            return self._said[tuple(words)]
        if "--from-ledger" in words:
            self._compute()
        with (
            _inside(self.folder),
            patch("sys.prefix", str(self.world.folder / "prefix")),
        ):  # where kernels are installed
            done = self.world.command(*words[2:])
        assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}{done.stderr}"
        if words[2:] == ["doctor"]:
            self._said[tuple(words)] = done.stdout
        return done.stdout

    def _shell(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _unending(self, line: str) -> str:
        """Run a command that continues until Ctrl-C, until it has said something, and end it as a person does."""
        words = tuple(shlex.split(line, comments=True))
        if words in self._said:
            return self._said[words]
        serves = " lab" in line
        said = self._begun_and_ended(words, serves=serves)
        if serves:
            self._said[words] = said
        return said

    def _begun_and_ended(self, words: tuple[str, ...], *, serves: bool) -> str:
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if serves else None,  # a server logs its address
            text=True,
        )
        line = shlex.join(words)
        try:
            assert process.stdout is not None
            said = ""
            for printed in process.stdout:
                said += printed
                if not serves or _SERVES.search(printed):
                    break
            else:
                raise AssertionError(f"{line}: ended with {process.wait()}\n{said}")
            if serves:
                port = int(_SERVES.findall(said)[0])
                until(lambda: _listens(port), "it listens there")
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)  # JupyterLab asks after the first one whether that is meant
            said += process.communicate(timeout=DEADLINE_S)[0]
            assert process.returncode in _ENDED, f"{line}: {process.returncode}\n{said}"
            return said
        finally:
            process.kill()
            process.communicate()

    def _environment(self) -> Mapping[str, str]:
        path = os.pathsep.join((str(self._shims), str(Path(sys.executable).parent), self.world.environment["PATH"]))
        return {**self.world.environment, "PATH": path}

    def _python(self, block: Block, text: str) -> str:
        if all(line.startswith(("c.GPUBroker.", " ", "}", "]", "#", "\n")) for line in text.splitlines(keepends=True)):
            return self._check_configuration(text)
        names = self._names.setdefault(block.page, _names(self.folder))
        printed = io.StringIO()
        with (
            _inside(self.folder),
            patch.dict(os.environ, {**self.world.environment, "JUPYTER_GPU_MEMORY_FRACTION": "0.2266"}, clear=True),
            patch(
                "sys.meta_path", [*sys.meta_path]
            ),  # a block may watch imports; another test's watcher must not meet that one
            redirect_stdout(printed),
            as_installed("spawner", Path(self.world.folder, f"spawner-{Path(block.page).stem}-{block.line}")),
        ):
            exec(compile(ast.parse(text), str(block), "exec"), names)  # noqa: S102 - that is what it is for
        for section in names["c"].values():
            for value in section.values():
                if isinstance(value, str) and re.fullmatch(r"fractional_gpu\w*(\.\w+)+", value):
                    import_item(value)
        return printed.getvalue()

    def _check_configuration(self, text: str) -> str:
        file = self.world.folder / "snippet.py"
        file.write_text(text)
        with as_installed("device-kind", self.world.folder / f"kind-{abs(hash(text))}"):
            load(file)
        return ""

    def _ipython(self, _: Block, text: str) -> str:
        reply = self.notebook().must(text)
        return reply.text + "".join(str(data.get("text/plain", "")) for data in reply.data)

    def _check_yaml(self, _: Block, text: str) -> str:
        content = yaml.safe_load(text)
        assert isinstance(content, dict), text
        if section := content.get("fractional_gpu"):
            load(None, {"pools": section["pools"]})
        if "scrape_configs" in content:
            file = self.folder / "prometheus.yml"
            file.write_text(text)
            self._shell(f"promtool check config --syntax-only {file}")
        return ""


def _listens(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("localhost", port)):
        return True
    return False


@contextmanager
def open_desk(world: World) -> Iterator[Desk]:
    shims = world.folder / "bin"
    shims.mkdir()
    python = f"exec {sys.executable} -P -m"
    (shims / "jupyter").write_text(
        f'#!/bin/sh\ncase $1 in gpu) shift; {python} fractional_gpu.commands.main "$@";; esac\n'
        f'exec {Path(sys.executable).parent}/jupyter "$@"\n'
    )
    for name in _DOES_NOTHING:
        (shims / name).write_text("#!/bin/sh\nexit 0\n")
    for shim in shims.iterdir():
        shim.chmod(0o755)
    (world.folder / "config" / "jupyter_server_config.py").write_text(
        "c.ServerApp.open_browser = False\nc.ServerApp.allow_root = True\nc.ServerApp.port = 0\n"
    )
    (world.folder / "home" / ".config" / "fish" / "completions").mkdir(parents=True)
    desk = Desk(world, shims)
    desk.open_page("")
    with _inside(world.notebooks):
        assert world.command("simulate", "--users", "2", "--set", "usage=usage.json").returncode == 0
    subprocess.run(
        [sys.executable, "lesson.py", "3", "lesson"], cwd=world.notebooks, check=True, stdout=subprocess.DEVNULL
    )
    for name in ("sessions", "cells"):
        shutil.copyfile(world.notebooks / f"lesson-{name}.csv", world.notebooks / f"{name}.csv")
    try:
        yield desk
    finally:
        desk.close()


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _names(folder: Path) -> dict[str, Any]:
    config = Config()
    return {
        "c": config,
        "get_config": lambda: config,
        "configure": import_item("fractional_gpu_hub.configure"),
        "batches": [1, 2],
        "train": lambda batch: batch,
        "torch": SimpleNamespace(cuda=SimpleNamespace(set_per_process_memory_fraction=_is_fraction)),
        "DriverDouble": DriverDouble,
        "Device": Device,
        "folder": folder / "double",
        "subprocess": subprocess,
        "sys": sys,
        "os": os,
    }


def _is_fraction(value: float) -> None:
    assert 0 < value <= 1, value


def _check_json(_: Block, text: str) -> str:
    stanza = json.loads(text)["metadata"]["kernel_provisioner"]
    assert stanza["provisioner_name"] == "fractional-gpu-provisioner"
    parse_kernel_config(stanza["config"], default_pool="default", default_fraction="1/4")
    return ""


def _check_toml(_: Block, text: str) -> str:
    examples = (tomllib.loads(file.read_text()) for file in (ROOT / "examples").glob("*/*.toml"))
    assert any(_within(tomllib.loads(text), example) for example in examples), text
    return ""


def _within(part: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    return all(
        _within(value, whole.get(key, {})) if isinstance(value, dict) else whole.get(key) == value
        for key, value in part.items()
    )


def _check_unit(_: Block, text: str) -> str:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # as the parser's documentation says
    unit.read_string(text)
    words = shlex.split(unit["Service"]["ExecStart"])
    check_arguments(f"jupyter gpu {shlex.join(words[1:])}")
    return ""


def check_arguments(line: str) -> None:
    """Parse a command of ours without running it. Raises AssertionError for one that the parser refuses."""
    words = shlex.split(line, comments=True)
    start = words.index("gpu") + 1
    name, arguments = words[start], words[start + 1 :]
    assert name in COMMANDS, f"there is no `jupyter gpu {name}`: {line}"
    try:
        subcommand(name)[1].parse_known_args(arguments)
    except SystemExit as ended:
        assert ended.code == 0, f"arguments are refused: {line}"  # noqa: PT017 - argparse ends with it


def says(shown: str, printed: str) -> bool:
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    pattern = r"[\s\S]*?".join(_loosely(line) for line in lines)
    return re.search(pattern, printed) is not None


def _loosely(line: str) -> str:
    text = re.escape(" ".join(line.split())).replace(re.escape("..."), ".*")
    return re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", text).replace(r"\ ", r"\s+")
