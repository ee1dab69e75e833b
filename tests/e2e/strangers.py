"""Run the public test suites of other Jupyter projects with our provisioner or spawner and without, and compare them test by test.

    python tests/e2e/strangers.py [--keep] [NAME ...]

`strangers.toml`, in this folder, pins the projects and lists every test that is known to differ, with the reason. For each project this
script downloads the pinned source distribution into a temporary folder, makes a virtual environment with the project and what its tests
need, and runs the suite twice: with the local provisioner before this project is installed there, then with this project as the default
provisioner (`JUPYTER_DEFAULT_PROVISIONER_NAME`) on a simulated device. A suite about spawners has a plugin for pytest in this folder,
which puts ours into the second run. If no distribution has the tests, Git clones the release (`repository`); Git's own setting
`url.<base>.insteadOf` names a copy of it on a machine that the site is out of reach of. The files of tests that differ and are not listed
run again, `AGAIN` times under both: a test whose outcomes overlap is flaky, and is printed as such. Prints a table, and
exits with 1 if a test that is not listed differs, a listed one no longer differs, or a suite does not run to its end. `--keep` leaves the
folder with every log and report. Needs a network for pip, configurable-http-proxy for JupyterHub's tests, and about an hour for all
projects on an idle machine with two processors.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fractional_gpu.broker.process.driver_start import simulated_folder
from tests.support.paths import ROOT

REPOSITORY = ROOT
PINS = Path(__file__).with_suffix(".toml")
AGAIN = 2
TEST_S = 180  # time limit of one test
INTERRUPT_S = 60  # for an interrupted suite to write its report
_MARK = "JUPYTER_GPU_STRANGERS"  # in the environment of every process of a suite: names the suite's folder
_LOCAL, _OURS = "local-provisioner", "fractional-gpu-provisioner"

Outcomes = dict[str, str]  # a test's name -> passed, skipped, failed or error


class SuiteError(Exception):
    """A suite cannot run, or did not finish; the message names the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """One pinned project. `known` maps the names of tests that differ to the reason.

    `plugin`: the module in this folder that puts our spawner into the suite; `repository`: what to clone if no source distribution
    contains the tests.
    """

    name: str
    version: str
    extras: str = ""
    requires: Sequence[str] = ()
    arguments: Sequence[str] = ()
    paths: Sequence[str] = ()
    plugin: str = ""
    repository: str = ""
    suite_s: int = 1200
    known: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    local: Outcomes
    ours: Outcomes
    unsteady: tuple[str, ...]
    differing: tuple[str, ...]

    def unexplained(self, known: Mapping[str, str]) -> list[str]:
        return [test for test in self.differing if test not in known]

    def outdated(self, known: Mapping[str, str]) -> list[str]:
        return [test for test in known if test not in self.differing and test not in self.unsteady]


def read_pins(path: Path = PINS) -> dict[str, Project]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(path.read_text())
    return {name: Project(name=name, **table) for name, table in tables.items()}


def outcomes(report: Path) -> Outcomes:
    found: Outcomes = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - pytest's own file
        name = f"{case.get('classname')}::{case.get('name')}"
        tags = {child.tag for child in case}
        outcome = next((word for tag, word in _WORDS if tag in tags), "passed")
        if found.get(name) != "failed":
            found[name] = outcome
    return found


_WORDS = (("failure", "failed"), ("error", "error"), ("skipped", "skipped"))


def differing(local: Outcomes, ours: Outcomes) -> list[str]:
    return sorted(name for name in local.keys() | ours.keys() if local.get(name) != ours.get(name))


def settle(tests: Iterable[str], local: Sequence[Outcomes], ours: Sequence[Outcomes]) -> tuple[list[str], list[str]]:
    """Classify tests that differed once, by all runs under both: if the outcomes overlap the test is flaky, otherwise it differs."""
    unsteady: list[str] = []
    differ: list[str] = []
    for test in tests:
        overlap = {run.get(test) for run in local} & {run.get(test) for run in ours}
        (unsteady if overlap else differ).append(test)
    return unsteady, differ


class Suite:
    def __init__(self, project: Project, folder: Path, wheel: Path) -> None:
        self._project, self._wheel = project, wheel
        self.folder = folder
        self._python = folder / "venv" / "bin" / "python"
        self._sources = folder
        self._runs = 0
        folder.mkdir()

    def prepare(self) -> None:
        name, version = self._project.name, self._project.version
        venv.create(self.folder / "venv", with_pip=True)
        if self._project.repository:
            self._sources = self.folder / "sources"
            clone = ("git", "clone", "--quiet", "--depth=1", f"--branch=v{version}", self._project.repository)
            self._call(*clone, str(self._sources))
        else:
            self._pip(
                "download", "--no-deps", "--no-binary", name, "--dest", str(self.folder / "sdist"), f"{name}=={version}"
            )
            (archive,) = (self.folder / "sdist").iterdir()
            unpack(archive, self.folder)
            self._sources = self.folder / archive.name.removesuffix(".tar.gz")
        extras = f"[{self._project.extras}]" if self._project.extras else ""
        self._pip("install", f"{name}{extras}=={version}", "pytest", "pytest-timeout", *self._project.requires)
        if self._project.plugin:
            (self.folder / "plugin").mkdir()
            shutil.copy(PINS.with_name(f"{self._project.plugin}.py"), self.folder / "plugin")
        elif not (self.folder / "venv/share/jupyter/kernels/python3/kernel.json").exists():
            # Our wheel would bring ipykernel along, and then tests that start kernels would fail only with the local provisioner.
            raise SuiteError(f"no kernelspec python3 without our wheel: add ipykernel to `requires` in {PINS.name}")

    def compare(self) -> Comparison:
        local = [self._run(_LOCAL)]
        self._pip("install", str(self._wheel))
        ours = [self._run(_OURS)]
        found = differing(local[0], ours[0])
        listed = [test for test in found if test in self._project.known]
        doubtful = [test for test in found if test not in self._project.known]
        if doubtful:
            ours += [self._run(_OURS, doubtful) for _ in range(AGAIN)]
            self._pip("uninstall", "--yes", "jupyter-fractional-gpu")
            local += [self._run(_LOCAL, doubtful) for _ in range(AGAIN)]
        unsteady, differ = settle(doubtful, local, ours)
        return Comparison(local=local[0], ours=ours[0], unsteady=tuple(unsteady), differing=(*listed, *differ))

    def _run(self, provisioner: str, again: Sequence[str] = ()) -> Outcomes:
        self._runs += 1
        run = self.folder / f"{self._runs}"
        for name in ("home", "tmp", "broker"):
            (run / name).mkdir(mode=0o700, parents=True)
        report, log = run / "junit.xml", run / "log"
        command = [
            *("nice", str(self._python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *(f"--timeout={TEST_S}", "--timeout-method=signal", "-o", "junit_family=xunit1", "-q"),
            *self._project.arguments,
            *(("-p", self._project.plugin) if self._project.plugin and provisioner == _OURS else ()),
        ]
        command += sorted({_file_of(test, self._sources) for test in again}) if again else self._project.paths
        print(f"  {self._project.name}: {provisioner}{f', {len(again)} tests again' if again else ''}", flush=True)
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    cwd=self._sources,
                    env=self._environment(run, provisioner),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                try:
                    process.wait(self._project.suite_s)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGINT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(INTERRUPT_S)
                    raise SuiteError(f"not at its end after {self._project.suite_s} s: {log}") from None
                finally:
                    end_marked(run)
                    process.wait()
        finally:
            shutil.rmtree(run / "tmp", ignore_errors=True)
            shutil.rmtree(simulated_folder(str(run / "broker" / "broker.sock")), ignore_errors=True)
        if process.returncode not in {0, 1}:  # 1: tests failed
            raise SuiteError(f"pytest ended with {process.returncode}: {log}")
        return outcomes(report)

    def _environment(self, run: Path, provisioner: str) -> dict[str, str]:
        """Return a fresh user's environment: new folders, nothing of Jupyter's, and one broker for all tests.

        Many suites give each test a separate runtime folder, and so each test would start a broker: on a busy machine that would use up
        the tests' time limits.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JUPYTER", "IPYTHON", "JPY_", "PYTEST", "PYTHON", "XDG_", "VIRTUAL_ENV"))
        }
        ours = {"JUPYTER_GPU_SIMULATE": "1x80GiB", "JUPYTER_GPU_SOCKET": str(run / "broker" / "broker.sock")}
        if self._project.plugin:
            ours["PYTHONPATH"] = str(self.folder / "plugin")
        return {
            **kept,
            **(ours if provisioner == _OURS else {}),
            _MARK: str(run),
            "PATH": f"{self._python.parent}{os.pathsep}{kept['PATH']}",
            "HOME": str(run / "home"),
            "TMPDIR": str(run / "tmp"),
            "JUPYTER_DEFAULT_PROVISIONER_NAME": provisioner,
        }

    def _pip(self, *arguments: str) -> None:
        self._call(str(self._python), "-m", "pip", "--disable-pip-version-check", *arguments)

    def _call(self, *command: str) -> None:
        log = self.folder / "prepare.log"
        with log.open("ab") as output:
            if subprocess.run(["nice", *command], stdout=output, stderr=output, check=False).returncode:
                raise SuiteError(f"{shlex.join(command)} failed: {log}")


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(folder)  # noqa: S202 - as above; the archives are pinned


def _file_of(test: str, sources: Path) -> str:
    parts = test.partition("::")[0].split(".")
    for length in range(len(parts), 0, -1):
        path = Path(*parts[:length]).with_suffix(".py")
        if (sources / path).exists():
            return str(path)
    raise SuiteError(f"no file in {sources} holds the test {test}")


def end_marked(run: Path) -> None:
    """Kill every process whose environment names this run: kernels, servers and brokers that a suite left."""
    mark = f"{_MARK}={run}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has ended meanwhile, or belongs to another user
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def build_wheel(folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY)],
        check=True,
    )
    (wheel,) = folder.glob("jupyter_fractional_gpu-*.whl")
    return wheel


def row(project: Project, result: Comparison) -> str:
    passed = [list(each.values()).count("passed") for each in (result.local, result.ours)]
    return (
        f"| {project.name} | {project.version} | {len(result.local)} | {passed[0]} | {passed[1]} | {len(result.differing)} | "
        f"{len(result.unsteady)} |"
    )


def tell(project: Project, result: Comparison) -> bool:
    for test in result.unsteady:
        print(f"  unsteady under both: {test}")
    for test in result.differing:
        print(
            f"  {test}: local {result.local.get(test)}, ours {result.ours.get(test)}; {project.known.get(test, 'NOT LISTED')}"
        )
    outdated = result.outdated(project.known)
    for test in outdated:
        print(f"  {test}: listed in {PINS.name}, but does not differ; take it out")
    return not outdated and not result.unexplained(project.known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    projects = read_pins()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these projects ({', '.join(projects)})")
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder, with every log")
    options = parser.parse_args()
    for name in options.names:
        if name not in projects:
            parser.error(f"{name!r} is not in {PINS.name}; allowed: {', '.join(projects)}")
    # A shell's background jobs ignore SIGINT, and so would every server of a suite.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, rows, good = Path(tempfile.mkdtemp(prefix="jfg-")), [], True
    try:
        wheel = build_wheel(folder)
        for project in (projects[name] for name in options.names or projects):
            print(f"{project.name} {project.version}", flush=True)
            suite = Suite(project, folder / project.name, wheel)
            try:
                suite.prepare()
                result = suite.compare()
            except SuiteError as error:
                rows.append(f"| {project.name} | {project.version} | {error} |")
                good = False
                continue
            good = tell(project, result) and good
            rows.append(row(project, result))
            print(f"  {rows[-1]}", flush=True)
            if not options.keep:
                shutil.rmtree(suite.folder)
    finally:
        if options.keep or not good:
            print(f"every log and report: {folder}")
        else:
            shutil.rmtree(folder)
    print(
        "| project | version | tests | passed local | passed ours | differing | unsteady |",
        "|---|---|---|---|---|---|---|",
        *rows,
        sep="\n",
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
