"""Which commands start ipykernel, and whether an interpreter can load the extension."""

import os
import sys
import tomllib

import pytest

from fractional_gpu.host.process import find_ipykernel, loads_extension
from fractional_gpu.jupyter.kernel_command import MARK, KernelPlan, plan_kernel
from fractional_gpu.jupyter.provisioner import FractionalGPUProvisioner
from fractional_gpu.protocol.names import LOWEST_MSGSPEC
from tests.jupyter.conftest import Places
from tests.support.fake_broker import FakeBroker
from tests.support.kernels import evaluate, running_kernel, talking_to
from tests.support.paths import ROOT

pytestmark = pytest.mark.promise("extension-name", "start-together")


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
    assert plan(places) == KernelPlan(gated=True)


@pytest.mark.parametrize("prints", ["import atexit; atexit.register(lambda: print('bye'))", "print('hello', end=' ')"])
def test_an_interpreter_whose_site_prints_is_found_to_have_it(places: Places, prints: str) -> None:
    (places.work / "sitecustomize.py").write_text(prints)
    assert plan(places, PYTHONPATH=str(places.work)) == KernelPlan(gated=True)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo this is wrong >&2; exit 1", "this is wrong"),
        ("exit 3", "exit code 3"),
        ("echo hello", "exit code 0"),
        (None, "No such file or directory"),
    ],
)
def test_an_interpreter_that_cannot_be_asked_has_no_extension_and_the_reason_is_told(
    places: Places, script: str | None, why: str
) -> None:
    broken = places.work / "broken"
    if script is not None:
        broken.write_text(f"#!/bin/sh\n{script}\n")
        broken.chmod(0o755)
    found = plan(places, interpreter=str(broken))
    assert not found.gated
    assert found.obstacle.startswith(f"{broken} could not report whether it has the GPU extension ({why})")
    assert "its share of the GPU is reserved as soon as it starts" in found.obstacle


def test_an_interpreter_without_the_extension_has_no_obstacle(places: Places) -> None:
    without = KernelPlan(gated=False)
    assert plan(places, "-I", "-S") == without  # without site-packages it is not importable


@pytest.mark.parametrize(
    ("argv", "language", "is_told"),
    [
        (["/opt/helper.sh", "python", "-m", "ipykernel_launcher", "-f", "{connection_file}"], "python", True),
        (
            ["conda", "run", "-n", "env", "python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "python",
            True,
        ),
        (["/opt/helper.sh", "{connection_file}"], "Python", True),
        (["/opt/helper.sh", "{connection_file}"], "R", False),
        (["python", "-m", "bash_kernel", "-f", "{connection_file}"], "bash", False),
    ],
)
def test_a_command_that_may_hide_python_is_told_with_what_to_do(argv: list[str], language: str, is_told: bool) -> None:
    found = plan_kernel(argv, os.environ, "/", language)
    assert (found.gated, found.command(argv)) == (False, argv)
    assert found.obstacle.startswith(f"{argv[0]} does not start ipykernel directly") == is_told
    assert ("`%load_ext fractional_gpu_kernel`" in found.obstacle) == is_told


def test_a_kernel_with_a_wrapper_starts_and_says_what_loads_the_extension(
    places: Places, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper = places.work / "helper.sh"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    argv = [str(wrapper), places.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    with running_kernel(places.write_gpu_spec(argv=argv)) as manager, talking_to(manager):
        assert isinstance(manager.provisioner, FractionalGPUProvisioner)
        assert "`%load_ext fractional_gpu_kernel`" in manager.provisioner.gpu_notice
    assert broker.bodies("create")[0]["gated"] is False
    assert f"{wrapper} does not start ipykernel directly" in caplog.text


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
    assert not found.gated
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
        ("mine = 42", "as msgspec, but jupyter-fractional-gpu needs that name for its calls to the GPU broker"),
    ],
    ids=["missing", "too old", "another module"],
)
def test_an_interpreter_without_the_msgspec_it_needs_has_no_gate_and_says_why(
    places: Places, source: str, says: str
) -> None:
    (places.work / "msgspec.py").write_text(source)
    found = plan(places, PYTHONPATH=str(places.work))
    assert not found.gated
    assert says in found.obstacle
    assert "its share of the GPU is reserved as soon as it starts" in found.obstacle
    assert not plan(places).gated  # next to the notebook
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


def test_a_kernel_next_to_a_module_of_our_name_holds_its_share_and_says_why(
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
