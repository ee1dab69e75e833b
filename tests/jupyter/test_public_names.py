"""The names that configurations use: one short path each, and nothing is loaded before they are used."""

import subprocess
import sys

import pytest

import fractional_gpu
from fractional_gpu.jupyter.kernel_manager import KeepingKernelManager
from fractional_gpu.jupyter.kernelspecs import SeatKernelSpecManager
from fractional_gpu.jupyter.provisioner import FractionalGPUProvisioner


def test_the_package_exposes_the_classes_that_configurations_name() -> None:
    classes = (FractionalGPUProvisioner, KeepingKernelManager, SeatKernelSpecManager)
    assert [getattr(fractional_gpu, name) for name in fractional_gpu.__all__] == list(classes)
    assert set(fractional_gpu.__all__) < set(dir(fractional_gpu))
    with pytest.raises(AttributeError, match="has no attribute 'KernelManager'"):
        _ = fractional_gpu.KernelManager


def test_importing_the_package_loads_nothing_else() -> None:
    program = "import sys, typing; before = set(sys.modules); import fractional_gpu; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["fractional_gpu"]
