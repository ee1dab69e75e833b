"""JAX and torch's child processes are limited by the variable that the installed release reads, and a user's own value is kept."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu_kernel.memory import CONTEXT_MIB, ImportHooks, MemoryLimits
from tests.support.packages import write

pytestmark = pytest.mark.promise("race-limits")

OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
CUDA, ANY = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
GRANT = {"JUPYTER_GPU_MEMORY_MIB": "20480", "JUPYTER_GPU_DEVICE_MIB": "81920", "JUPYTER_GPU_CAP": ""}
RESIZED = {"JUPYTER_GPU_MEMORY_MIB": "40960"}
FRACTION = f"{(20480 - CONTEXT_MIB) / 81920:.4f}"
RESIZED_FRACTION = f"{(40960 - CONTEXT_MIB) / 81920:.4f}"

# How jaxlib reads them: 0.4.31 and older, 0.4.33 and newer (0.12.0 too).
OLD_JAXLIB = f"""
import os
def generate_pjrt_gpu_plugin_options():
    return os.getenv("{OLD}", "")
"""
NEW_JAXLIB = f"""
import os
def generate_pjrt_gpu_plugin_options():
    fraction, deprecated = os.getenv("{NEW}", ""), os.getenv("{OLD}", "")
    if fraction and deprecated:
        raise ValueError("{NEW} is specified together with {OLD}. Remove the latter one, it is deprecated.")
    return fraction or deprecated
"""
HEADER = "torch/include/c10/cuda/CUDAAllocatorConfig.h"
READS = '"pinned_num_register_threads", "per_process_memory_fraction"'  # torch 2.10.0 and newer


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    others = ("CUPY_GPU_MEMORY_LIMIT", "TF_FORCE_GPU_ALLOW_GROWTH", "XLA_PYTHON_CLIENT_PREALLOCATE")
    for name in (OLD, NEW, CUDA, ANY, *others, *GRANT):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    yield tmp_path
    for name in ("torch", "torch._utils", "jaxlib", "jaxlib.xla_client"):
        sys.modules.pop(name, None)


@pytest.fixture
def limits(site: Path) -> Iterator[MemoryLimits]:  # noqa: ARG001 - the variables are as the folder's fixture left them
    made = MemoryLimits(os.environ, ImportHooks())
    made.install()
    yield made
    made.hooks.close()


def install_jaxlib(site: Path, source: str) -> None:
    write(site, {"jaxlib/__init__.py": "", "jaxlib/xla_client.py": source})
    importlib.invalidate_caches()


def install_torch(site: Path, header: str, source: str = "") -> None:
    write(site, {HEADER: header, "torch/__init__.py": f"import torch._utils\n{source}", "torch/_utils.py": ""})
    importlib.invalidate_caches()


def options() -> str:
    read: Any = importlib.import_module("jaxlib.xla_client")
    return str(read.generate_pjrt_gpu_plugin_options())


@pytest.mark.parametrize(("source", "name", "other"), [(OLD_JAXLIB, OLD, NEW), (NEW_JAXLIB, NEW, OLD)])
def test_jax_is_limited_by_the_name_that_its_release_reads(
    site: Path, limits: MemoryLimits, source: str, name: str, other: str
) -> None:
    install_jaxlib(site, source)
    limits.bind(GRANT)
    assert (os.environ.get(name), os.environ.get(other)) == (FRACTION, None)
    limits.bind(RESIZED)
    assert (os.environ.get(name), os.environ.get(other)) == (RESIZED_FRACTION, None)
    assert options() == RESIZED_FRACTION


@pytest.mark.parametrize("name", [OLD, NEW])
def test_a_user_s_own_fraction_for_jax_is_the_only_one(
    site: Path, limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install_jaxlib(site, NEW_JAXLIB)
    monkeypatch.setenv(name, ".5")
    limits.bind(GRANT)
    assert options() == ".5"


@pytest.mark.parametrize("name", [OLD, NEW])
def test_a_fraction_that_a_cell_sets_before_jax_s_first_use_is_the_only_one(
    site: Path, limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install_jaxlib(site, NEW_JAXLIB)
    limits.bind(GRANT)
    importlib.import_module("jaxlib.xla_client")
    monkeypatch.setenv(name, ".5")
    assert options() == ".5"


def test_a_jax_that_is_installed_after_the_grant_is_limited_by_its_own_name(site: Path, limits: MemoryLimits) -> None:
    limits.bind(GRANT)
    install_jaxlib(site, NEW_JAXLIB)
    assert options() == FRACTION
    assert (os.environ.get(OLD), os.environ.get(NEW)) == (None, FRACTION)


def test_a_fraction_for_jax_that_a_user_took_away_stays_away(site: Path, limits: MemoryLimits) -> None:
    install_jaxlib(site, NEW_JAXLIB)
    limits.bind(GRANT)
    del os.environ[NEW]
    for _ in range(2):
        limits.bind(RESIZED)
        assert options() == ""


def test_children_of_a_torch_that_reads_a_fraction_get_one(site: Path, limits: MemoryLimits) -> None:
    install_torch(site, READS)
    limits.bind(GRANT)
    assert os.environ.get(CUDA) == f"per_process_memory_fraction:{FRACTION}"
    limits.bind(RESIZED)
    assert os.environ.get(CUDA) == f"per_process_memory_fraction:{RESIZED_FRACTION}"
    assert ANY not in os.environ


@pytest.mark.parametrize(
    ("reads", "grant"), [('"pinned_num_register_threads"', GRANT), (READS, {**GRANT, "JUPYTER_GPU_CAP": "driver"})]
)
def test_children_get_none_if_torch_refuses_the_key_or_the_driver_caps_them(
    reads: str, grant: dict[str, str], site: Path, limits: MemoryLimits
) -> None:
    install_torch(site, reads)
    limits.bind(grant)
    assert {CUDA, ANY}.isdisjoint(os.environ)


def test_without_torch_nothing_is_set_for_it(limits: MemoryLimits) -> None:
    limits.bind(GRANT)
    assert {CUDA, ANY}.isdisjoint(os.environ)


@pytest.mark.parametrize("name", [CUDA, ANY])
@pytest.mark.parametrize("theirs", ["expandable_segments:True", "roundup_power2_divisions:[256:1,512:2,>:4]"])
def test_a_user_s_settings_of_torch_s_allocator_are_extended(
    site: Path, limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch, name: str, theirs: str
) -> None:
    install_torch(site, READS)
    monkeypatch.setenv(name, theirs)
    for variables, fraction in ((GRANT, FRACTION), (RESIZED, RESIZED_FRACTION)):
        limits.bind(variables)
        assert os.environ.get(name) == f"{theirs},per_process_memory_fraction:{fraction}"
    assert len({CUDA, ANY} & os.environ.keys()) == 1


@pytest.mark.parametrize("name", [CUDA, ANY])
def test_a_user_s_own_fraction_for_torch_stays(
    site: Path, limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install_torch(site, READS)
    monkeypatch.setenv(name, "per_process_memory_fraction:0.9,expandable_segments:True")
    limits.bind(GRANT)
    limits.bind(RESIZED)
    assert os.environ.get(name) == "per_process_memory_fraction:0.9,expandable_segments:True"
    assert len({CUDA, ANY} & os.environ.keys()) == 1


@pytest.mark.parametrize("name", [CUDA, ANY])
def test_what_a_cell_sets_before_it_imports_torch_is_what_torch_reads(
    site: Path, limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """CUDA's allocator reads only the first of the two variables that is set."""
    install_torch(site, READS, f'import os\nread = os.environ.get("{CUDA}", os.environ.get("{ANY}"))\n')
    limits.bind(GRANT)
    monkeypatch.setenv(name, "backend:cudaMallocAsync")
    assert importlib.import_module("torch").read == f"backend:cudaMallocAsync,per_process_memory_fraction:{FRACTION}"


def test_another_process_gets_nothing_that_depends_on_the_releases_installed_here(site: Path) -> None:
    """It is unknown what a command imports: every jaxlib reads the old name, and an older torch rejects the key."""
    install_torch(site, READS)
    install_jaxlib(site, NEW_JAXLIB)
    environment = dict(GRANT)
    MemoryLimits(environment).bind({})
    assert environment[OLD] == FRACTION
    assert {NEW, CUDA, ANY}.isdisjoint(environment)
