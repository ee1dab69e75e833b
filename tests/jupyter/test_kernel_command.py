"""Which commands start ipykernel, and whether an interpreter can load the extension."""

import os
import sys
import threading
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fractional_gpu.host.process import find_ipykernel, loads_extension
from fractional_gpu.jupyter import kernel_command
from fractional_gpu.jupyter.kernel_command import MARK, KernelPlan, plan_kernel
from fractional_gpu.jupyter.provisioner import FractionalGPUProvisioner
from fractional_gpu.protocol.names import LOWEST_MSGSPEC
from tests.jupyter.conftest import Places
from tests.support.fake_broker import FakeBroker
from tests.support.kernels import evaluate, running_kernel, talking_to
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("argv", "position"),
    [
        (["python", "-m", "ipykernel_launcher", "-f", "c"], 1),
        (["python", "-Xfrozen_modules=off", "-W", "error", "-m", "ipykernel", "-f", "c"], 4),
        (["python", "-c", "print()"], None),
        (["python", "-m", "bash_kernel", "-f", "c"], None),
        (["conda", "run", "python", "-m", "ipykernel_launcher"], None),
        (["python", "-m"], None),
        (["python", "-c"], None),
        (["R", "--slave", "-e", "IRkernel::main()"], None),
        (["kernel"], None),
        ([], None),
    ],
    ids=str,
)
def test_ipykernel_is_recognised_by_what_python_is_told_to_run(argv: list[str], position: int | None) -> None:
    assert find_ipykernel(argv) == position


@pytest.mark.parametrize(
    ("argv", "loads"),
    [
        (["python", "-m", "ipykernel_launcher", "-f", "c"], False),
        (["python", "-Wignore", "-m", "fractional_gpu_kernel", "ipykernel_launcher", "-f", "c"], True),
        (["bash_kernel", "-f", "fractional_gpu_kernel"], False),
        (["python", "-m"], False),
    ],
    ids=str,
)
def test_a_kernel_with_the_extension_is_recognised_by_its_command(argv: list[str], loads: bool) -> None:
    assert loads_extension(argv) == loads


def plan(places: Places, *options: str, interpreter: str | None = None, **environment: str) -> KernelPlan:
    argv = [interpreter or places.python, *options, "-m", "ipykernel_launcher"]
    return plan_kernel(argv, {**os.environ, **environment}, str(places.work))


def test_an_interpreter_that_has_the_extension_is_found_to_have_it(places: Places) -> None:
    assert plan(places) == KernelPlan(is_ipykernel=True, gated=True)


def test_kernels_that_start_at_the_same_time_ask_the_interpreter_once(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked, all_ask = kernel_command._probe, list[list[str]](), threading.Event()

    class Questions(dict[Any, Any]):
        """Counts the threads that need the answer."""

        callers = 0

        def setdefault(self, key: object, default: object = None) -> Any:  # noqa: ANN401 - dict's
            answer = super().setdefault(key, default)
            self.callers += 1
            if self.callers == 4:
                all_ask.set()
            return answer

    def probe(command: list[str], environment: Mapping[str, str]) -> kernel_command._Modules | None:
        asked.append(command)
        assert all_ask.wait(60)
        return real(command, environment)

    monkeypatch.setattr(kernel_command, "_answers", {})
    monkeypatch.setattr(kernel_command, "_running_probes", Questions())
    monkeypatch.setattr(kernel_command, "_probe", probe)
    with ThreadPoolExecutor(4) as threads:
        plans = [threads.submit(plan, places) for _ in range(4)]
        assert [one.result() for one in plans] == [KernelPlan(is_ipykernel=True, gated=True)] * 4
    assert len(asked) == 1
    assert kernel_command._running_probes == {}


def test_an_interpreter_that_cannot_be_asked_has_no_extension(places: Places) -> None:
    without = KernelPlan(is_ipykernel=True, gated=False)
    broken = places.work / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert plan(places, interpreter=str(broken)) == without
    assert plan(places, interpreter="/nowhere/python") == without
    assert plan(places, interpreter="no-such-python") == without
    assert plan(places, "-I", "-S") == without  # without site-packages it is not importable


def test_what_is_found_is_found_again_only_while_it_is_there(places: Places) -> None:
    assert not plan(places, "-S", interpreter=sys.executable, PYTHONPATH=str(places.work)).gated
    for name in ("fractional_gpu_kernel", "fractional_gpu"):
        (places.work / name).mkdir()
        (places.work / name / "__init__.py").write_text(MARK)
    (places.work / "msgspec.py").write_text(f"__version__ = {LOWEST_MSGSPEC!r}")
    assert plan(places, "-S", interpreter=sys.executable, PYTHONPATH=str(places.work)).gated
    (places.work / "fractional_gpu_kernel" / "__init__.py").unlink()
    assert not plan(places, "-S", interpreter=sys.executable, PYTHONPATH=str(places.work)).gated


@pytest.mark.parametrize(
    "foreign", ["fractional_gpu_kernel/__init__.py", "fractional_gpu_kernel.py", "fractional_gpu.py"]
)
@pytest.mark.parametrize("where", ["on PYTHONPATH", "beside the notebook"])
def test_a_module_that_only_has_our_name_is_not_taken_for_ours(places: Places, foreign: str, where: str) -> None:
    (path := places.work / foreign).parent.mkdir(exist_ok=True)
    path.touch()
    argv = [places.python, "-m", "ipykernel_launcher", "-f", "c"]
    environment = {**os.environ, "PYTHONPATH": str(places.work) if where == "on PYTHONPATH" else ""}
    folder = str(places.work) if where == "beside the notebook" else "/"
    assert plan_kernel(argv, os.environ, "/").gated  # before it is found, and remembered
    found = plan_kernel(argv, environment, folder)
    assert (found.is_ipykernel, found.gated) == (True, False)
    assert f"imports {path} as {foreign[: foreign.index('.')].partition('/')[0]}" in found.obstacle
    assert found.command(argv) == argv
    path.write_text(MARK)
    assert plan_kernel(argv, environment, folder).gated  # ours, in another place
    path.rename(path.with_name("renamed.py"))
    assert plan_kernel(argv, environment, folder).gated


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError", "has no msgspec that can be imported, and jupyter-fractional-gpu needs version 0.19"),
        (
            "__version__ = '0.18.6'",
            "has msgspec 0.18.6, and jupyter-fractional-gpu needs version 0.19 or newer there: run `",
        ),
        ("mine = 42", "as msgspec, a name that jupyter-fractional-gpu needs there for its calls of the GPU broker"),
    ],
    ids=["missing", "too old", "another module"],
)
def test_an_interpreter_without_the_msgspec_it_needs_has_no_gate_and_says_why(
    places: Places, source: str, says: str
) -> None:
    (places.work / "msgspec.py").write_text(source)
    found = plan(places, PYTHONPATH=str(places.work))
    assert (found.is_ipykernel, found.gated) == (True, False)
    assert says in found.obstacle
    assert "keeps its share of the GPU reserved from its start" in found.obstacle
    assert not plan(places).gated  # beside the notebook
    (places.work / "msgspec.py").unlink()
    assert plan(places, PYTHONPATH=str(places.work)).gated


def test_the_lowest_msgspec_is_the_one_that_the_package_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"msgspec>={LOWEST_MSGSPEC}" in declared


def test_a_module_of_our_name_that_appears_later_is_noticed(places: Places) -> None:
    assert plan(places, PYTHONPATH=str(places.work)).gated
    (places.work / "fractional_gpu_kernel.py").touch()
    later = plan(places, PYTHONPATH=str(places.work))
    assert not later.gated
    assert later.obstacle


def test_a_kernel_beside_a_module_of_our_name_holds_its_share_and_says_why(
    places: Places, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (places.work / "fractional_gpu_kernel.py").write_text("mine = 42")
    monkeypatch.setenv("PYTHONPATH", str(places.work))
    with running_kernel(places.write_gpu_spec()) as manager, talking_to(manager) as client:
        assert evaluate(client, "__import__('fractional_gpu_kernel').mine") == "42"
        assert evaluate(client, "gpu_extension").startswith("NameError")
        assert isinstance(manager.provisioner, FractionalGPUProvisioner)
        notice = manager.provisioner.gpu_notice
    assert broker.bodies("create")[0]["gated"] is False
    assert f"imports {places.work / 'fractional_gpu_kernel.py'} as fractional_gpu_kernel" in notice
    assert "Rename that module" in notice
    assert notice.removesuffix(".") in caplog.text
