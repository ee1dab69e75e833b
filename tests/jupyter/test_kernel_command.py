"""Which commands start ipykernel, and whether an interpreter will really find the extension."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.host.ipykernel_command import EXTENSION_ARGUMENT, find_ipykernel
from fractional_gpu.jupyter import kernel_command
from fractional_gpu.jupyter.kernel_command import LAUNCH_CODE, MARK, KernelPlan, launch_argv, plan_kernel
from fractional_gpu.jupyter.provisioner import FractionalGPUProvisioner
from tests.jupyter.conftest import Places
from tests.support.fake_broker import FakeBroker
from tests.support.kernels import evaluate, running_kernel, talking_to
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["python", "-m", "ipykernel_launcher", "-f", "c"], (1, 3, False)),
        (["python", "-Xfrozen_modules=off", "-W", "error", "-m", "ipykernel", "-f", "c"], (4, 6, False)),
        (["python", "-P", "-c", LAUNCH_CODE, "-f", "c"], (2, 4, True)),
        (["python", "-c", "print()"], None),
        (["python", "-m", "bash_kernel", "-f", "c"], None),
        (["conda", "run", "python", "-m", "ipykernel_launcher"], None),
        (["python", "-m"], None),
        (["R", "--slave", "-e", "IRkernel::main()"], None),
        (["kernel"], None),
        ([], None),
    ],
    ids=str,
)
def test_ipykernel_is_recognised_by_what_python_is_told_to_run(
    argv: list[str], found: tuple[int, int, bool] | None
) -> None:
    kernel = find_ipykernel(argv)
    assert (kernel and (kernel.start, kernel.stop, kernel.ours)) == found


def test_the_protected_form_keeps_options_and_arguments() -> None:
    argv = ["python", "-X", "dev", "-m", "ipykernel_launcher", "-f", "{connection_file}", "--debug"]
    found = find_ipykernel(argv)
    assert found is not None
    expected = ["python", "-X", "dev", "-P", "-c", LAUNCH_CODE, "-f", "{connection_file}", "--debug"]
    assert launch_argv(argv, found) == expected
    assert find_ipykernel(expected) is not None


def plan(places: Places, *options: str, interpreter: str | None = None, **environment: str) -> KernelPlan:
    argv = [interpreter or places.python, *options, "-m", "ipykernel_launcher"]
    return plan_kernel(argv, {**os.environ, **environment}, str(places.work))


def test_an_interpreter_that_has_the_extension_is_found_to_have_it(places: Places) -> None:
    assert plan(places) == KernelPlan(is_ipykernel=True, gated=True, protect=False)


def test_kernels_that_start_at_the_same_time_ask_the_interpreter_once(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked, all_ask = kernel_command._probe, list[list[str]](), threading.Event()

    class Questions(dict[Any, Any]):
        """Counts those who ask."""

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

    monkeypatch.setattr(kernel_command, "_found", {})
    monkeypatch.setattr(kernel_command, "_asked", Questions())
    monkeypatch.setattr(kernel_command, "_probe", probe)
    with ThreadPoolExecutor(4) as threads:
        plans = [threads.submit(plan, places) for _ in range(4)]
        assert [one.result() for one in plans] == [KernelPlan(is_ipykernel=True, gated=True, protect=False)] * 4
    assert len(asked) == 1
    assert kernel_command._asked == {}


def test_an_interpreter_that_cannot_be_asked_has_no_extension(places: Places) -> None:
    without = KernelPlan(is_ipykernel=True, gated=False)
    broken = places.work / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert plan(places, interpreter=str(broken)) == without
    assert plan(places, interpreter="/nowhere/python") == without
    assert plan(places, interpreter="no-such-python") == without
    assert plan(places, "-I", "-S") == without  # without site-packages it is not importable


def test_our_own_form_is_not_asked_about_because_it_cannot_become_a_kernel_without_the_extension(
    places: Places,
) -> None:
    argv = [places.python, "-P", "-c", LAUNCH_CODE]
    assert plan_kernel(["/nowhere/python", *argv[1:]], {}, str(places.work)) == KernelPlan(
        is_ipykernel=True, gated=True
    )
    without = {**os.environ, "PYTHONPATH": ""}
    ended = subprocess.run([argv[0], "-I", "-S", *argv[1:]], env=without, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "No module named 'fractional_gpu_kernel'" in ended.stderr


def test_what_is_found_is_found_again_only_while_it_is_there(places: Places) -> None:
    assert not plan(places, "-S", interpreter=sys.executable, PYTHONPATH=str(places.work)).gated
    for name in ("fractional_gpu_kernel", "fractional_gpu"):
        (places.work / name).mkdir()
        (places.work / name / "__init__.py").write_text(MARK)
    assert plan(places, "-S", interpreter=sys.executable, PYTHONPATH=str(places.work)).gated
    (places.work / "fractional_gpu_kernel" / "__init__.py").unlink()
    assert not plan(places, "-S", interpreter=sys.executable, PYTHONPATH=str(places.work)).gated


@pytest.mark.parametrize(
    "shadow", ["fractional_gpu_kernel/__init__.py", "fractional_gpu/__init__.py", "fractional_gpu_kernel.py"]
)
def test_a_folder_of_our_name_beside_the_notebook_does_not_shadow_ours(
    places: Places, broker: FakeBroker, shadow: str
) -> None:
    path = places.work / shadow
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise RuntimeError('shadowed')")
    (places.work / "mymodule.py").write_text("answer = 42")
    with running_kernel(places.write_gpu_spec(), cwd=str(places.work)) as manager, talking_to(manager) as client:
        assert "site-packages/fractional_gpu_kernel" in evaluate(client, "gpu_extension")
        assert evaluate(client, "__import__('mymodule').answer") == "42"
        ours = evaluate(client, "__import__('fractional_gpu').__file__").strip("'")
        assert Path(ours).resolve() == ROOT / "provisioner" / "fractional_gpu" / "__init__.py"
    assert broker.bodies("create")[0]["gated"] is True


@pytest.mark.parametrize(
    "foreign", ["fractional_gpu_kernel/__init__.py", "fractional_gpu_kernel.py", "fractional_gpu.py"]
)
@pytest.mark.parametrize("ours", [False, True], ids=["plain form", "our form"])
def test_a_module_that_only_has_our_name_is_not_taken_for_ours(places: Places, foreign: str, ours: bool) -> None:
    (path := places.work / foreign).parent.mkdir(exist_ok=True)
    path.touch()
    begin = ["-P", "-c", LAUNCH_CODE] if ours else ["-m", "ipykernel_launcher"]
    argv = [places.python, *begin, "-f", "c", EXTENSION_ARGUMENT]
    environment = {**os.environ, "PYTHONPATH": str(places.work)}
    assert plan_kernel(argv, os.environ, "/").gated  # before it is found, and remembered
    found = plan_kernel(argv, environment, "/")
    assert (found.is_ipykernel, found.gated) == (True, False)
    assert f"imports {path} as {foreign[: foreign.index('.')].partition('/')[0]}" in found.foreign
    assert found.command(argv) == [places.python, "-m", "ipykernel_launcher", "-f", "c"]
    path.rename(path.with_name("renamed.py"))
    assert plan_kernel(argv, environment, "/").gated


def test_a_module_of_our_name_that_appears_later_is_noticed(places: Places) -> None:
    assert plan(places, PYTHONPATH=str(places.work)).gated
    (places.work / "fractional_gpu_kernel.py").touch()
    later = plan(places, PYTHONPATH=str(places.work))
    assert not later.gated
    assert later.foreign


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
