"""Kernelspecs that cannot start, and idle cullers that would end suspended kernels."""

import json
import sys
from pathlib import Path

import pytest

from fractional_gpu.commands.doctor.report import Finding, Severity
from fractional_gpu.commands.doctor.setup import check_cullers, check_kernelspecs
from fractional_gpu.config import Settings, load
from fractional_gpu.jupyter.kernelspecs import install

pytestmark = pytest.mark.promise("extension-name")


@pytest.fixture
def specs(jupyter_home: Path) -> Path:
    folder = jupyter_home / "data" / "kernels"
    folder.mkdir()
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    base = {"argv": argv, "display_name": "Python 3 (ipykernel)", "language": "python"}
    (folder / "plain").mkdir()
    (folder / "plain" / "kernel.json").write_text(json.dumps(base))
    return folder


def set_up(specs: Path, *fractions_milli: int, pool: str = "default") -> None:
    install(pool, fractions_milli, directory=str(specs), base="plain")


def change_argv(specs: Path, name: str, argv: list[str]) -> None:
    file = specs / name / "kernel.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "argv": argv}))


def settings(jupyter_home: Path, text: str) -> Settings:
    file = jupyter_home / "config" / "jupyter_gpu_config.py"
    file.write_text(text)
    return load(file)


def the(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


def test_a_vanished_interpreter_is_an_error(specs: Path) -> None:
    set_up(specs, 250)
    change_argv(specs, "fractional-gpu-default-250-plain", ["/gone/bin/python", "-P", "-c", "pass"])
    found = the(list(check_kernelspecs(None)))
    assert found.severity is Severity.ERROR
    assert "/gone/bin/python" in found.finding


def test_a_shadowed_kernelspec_is_a_warning(specs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "first"))
    install("default", [250], directory=str(tmp_path / "first" / "kernels"), base="plain")
    install("default", [250], directory=str(specs), base="plain")
    (finding,) = [one for one in check_kernelspecs(None) if "does not show" in one.finding]
    assert str(tmp_path / "first") in finding.finding


def test_a_kernelspec_without_a_command_is_an_error(specs: Path) -> None:
    set_up(specs, 250)
    change_argv(specs, "fractional-gpu-default-250-plain", [])
    assert the(list(check_kernelspecs(None))).severity is Severity.ERROR


def test_an_interpreter_without_the_extension_is_an_error_once(specs: Path, tmp_path: Path) -> None:
    set_up(specs, 250, 500)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'fractional_gpu_kernel'\" >&2\nexit 1\n")
    python.chmod(0o755)
    for name in ("fractional-gpu-default-250-plain", "fractional-gpu-default-500-plain"):
        change_argv(specs, name, [str(python), "-P", "-c", "pass"])
    found = the(list(check_kernelspecs(None)))
    assert found.severity is Severity.ERROR
    assert "No module named 'fractional_gpu_kernel'" in found.finding


def test_a_module_that_only_has_the_extensions_name_is_a_warning(
    specs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_up(specs, 250)
    (tmp_path / "fractional_gpu_kernel.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = the(list(check_kernelspecs(None)))
    assert found.severity is Severity.WARNING
    assert f"imports {tmp_path / 'fractional_gpu_kernel.py'} as fractional_gpu_kernel" in found.finding


def test_an_interpreter_with_an_old_msgspec_is_a_warning_that_says_what_to_run(
    specs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_up(specs, 250)
    (tmp_path / "msgspec.py").write_text("__version__ = '0.18.6'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = the(list(check_kernelspecs(None)))
    assert found.severity is Severity.WARNING
    assert f"{sys.executable} -m pip install 'msgspec>=0.19'" in found.finding


def test_a_kernelspec_for_what_is_not_on_offer_is_a_warning(specs: Path, jupyter_home: Path) -> None:
    set_up(specs, 250)
    set_up(specs, 500, pool="teaching")
    known = settings(jupyter_home, "c.GPUBroker.pools = {'default': {'fractions': ['1/2', '1']}}")
    offer, pool = check_kernelspecs(known)
    assert (offer.severity, pool.severity) == (Severity.WARNING, Severity.WARNING)
    assert "asks for 1/4, but its pool only offers 1/2, 1" in offer.finding
    assert "pool 'teaching', which is not configured" in pool.finding


# -- cullers ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    return folder


def process(proc: Path, pid: int, *words: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))


def cullers(proc: Path, folder: Path, **environment: str) -> list[Finding]:
    return list(check_cullers(environment=environment, folders=[str(folder)], proc=proc))


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("jupyter_server_config.py", "\nc.MappingKernelManager.cull_idle_timeout = 600  # 10 min\n", "line 2"),
        ("jupyter_lab_config.py", "c.AsyncMappingKernelManager.cull_idle_timeout=60*60", "is 60*60"),
        (
            "jupyter_config.py",
            "c.ServerApp.shutdown_no_activity_timeout = 3600",
            "shutdown_no_activity_timeout is 3600",
        ),
        (
            "jupyter_server_config.json",
            '{"MappingKernelManager": {"cull_idle_timeout": 600}}',
            "cull_idle_timeout is 600",
        ),
        (
            "jupyter_server_config.d/x.json",
            '{"MappingKernelManager": {"cull_idle_timeout": 9}}',
            "cull_idle_timeout is 9",
        ),
    ],
)
def test_a_configured_culler_is_a_warning_that_names_the_place(
    proc: Path, tmp_path: Path, name: str, text: str, place: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    found = the(cullers(proc, tmp_path))
    assert found.severity is Severity.WARNING
    assert str(file) in found.finding
    assert place in found.finding
    assert "idle_after" in found.advice


def test_a_running_server_with_a_culler_and_a_hubs_culler_are_found(proc: Path, tmp_path: Path) -> None:
    process(proc, 10, "python3", "-m", "jupyter_server", "--MappingKernelManager.cull_idle_timeout=300")
    process(proc, 11, "python3", "-m", "jupyterhub_idle_culler", "--timeout=3600")
    process(proc, 12, "python3", "-m", "jupyter_server", "--MappingKernelManager.cull_idle_timeout=0")
    found = sorted(one.finding for one in cullers(proc, tmp_path))
    assert len(found) == 2
    assert found[0].startswith("process 10: MappingKernelManager.cull_idle_timeout is 300")
    assert found[1].startswith("process 11 is an idle culler of a hub")


def test_a_hubs_user_is_told_that_the_hubs_culler_cannot_be_seen(proc: Path, tmp_path: Path) -> None:
    found = the(cullers(proc, tmp_path, JUPYTERHUB_SERVICE_PREFIX="/user/ann/"))
    assert found.severity is Severity.NOTE
    assert "administrator" in found.advice
