"""The msgspec of a kernel's environment: the lowest version that pyproject.toml allows is enough; a missing one is named."""

import os
import sys
from pathlib import Path

import pytest

from fractional_gpu.protocol.messages import GateVerb
from fractional_gpu.protocol.names import LOWEST_MSGSPEC
from tests.kernelext.kernels import kernel_environment, running_kernel
from tests.kernelext.scripted_broker import ScriptedBroker

LOWEST = Path(sys.prefix) / "lowest-msgspec"  # installed by `tests/run setup`


def with_msgspec(folder: Path, broker: ScriptedBroker, msgspec: Path) -> dict[str, str]:
    environment = kernel_environment(folder, broker.path)
    return {**environment, "PYTHONPATH": os.pathsep.join([str(msgspec), environment["PYTHONPATH"]])}


def test_a_kernel_works_with_the_lowest_msgspec(folder: Path, broker: ScriptedBroker) -> None:
    with running_kernel(with_msgspec(folder, broker, LOWEST)) as kernel:
        request = kernel.send("import msgspec; print(msgspec.__version__)")
        stream = broker.stream("acquire")
        stream.waiting("lease-2 runs a cell on the only GPU.")
        kernel.until_shown(request, "lease-2 runs a cell on the only GPU.")
        stream.granted(CUDA_VISIBLE_DEVICES="GPU-7")
        assert kernel.finish(request).printed.startswith(f"{LOWEST_MSGSPEC}.")
        assert kernel.run("%gpu").status == "ok"
        broker.stream("gate").command(GateVerb.CLOSE, 5)
        assert broker.answer_to(5) == "closed"


@pytest.mark.parametrize("source", ["raise ImportError", "__version__ = '0.18.6'"], ids=["missing", "too old"])
def test_a_kernel_without_the_msgspec_it_needs_says_so_and_runs_no_cell_on_the_gpu(
    folder: Path, broker: ScriptedBroker, tmp_path: Path, source: str
) -> None:
    (tmp_path / "msgspec.py").write_text(source)
    with running_kernel(with_msgspec(folder, broker, tmp_path)) as kernel:
        outcome = kernel.run("print('on the GPU')")
        assert (outcome.status, outcome.printed) == ("error", "")
        assert kernel.run("%%cpu\nprint('without it')").printed == "without it\n"
        shown = "".join([*outcome.shown, *kernel.run("%%cpu\n1").shown])
        assert f"-m pip install 'msgspec>={LOWEST_MSGSPEC}'` and restart the kernel." in shown
    assert broker.routes() == []
