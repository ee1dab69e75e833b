"""The extension for a kernel without a lease. `%gpu` prints why there is no lease, and a notice shows the reason once.

Notebooks written for a GPU share still work: `%gpu` lines print why they do nothing, and `%%gpu` and `%%cpu` act as comments.
"""

from typing import Any

from IPython.core.inputtransformer2 import cell_magic, leading_empty_lines

from fractional_gpu_kernel.cells.gate import is_measure, make_cell_transform
from fractional_gpu_kernel.display.lines import Notices, Sentence, publish
from fractional_gpu_kernel.registrations import Registrations

NO_LEASE = (
    "This kernel has no share of a GPU. Pick a kernel with one, such as “Python 3 · 1/4 GPU”, in the launcher or the kernel menu; "
    "`jupyter gpu kernels install` creates them."
)
MEASURE_RUNS = "This cell runs once and is not measured."
BURST_RUNS = "This cell runs without the larger share that %%gpu requests."


class UnleasedKernel:
    def __init__(self, shell: Any, notice: str) -> None:  # noqa: ANN401 - as above
        self._shell = shell
        self._registrations = Registrations(shell)
        self._notice = notice
        self._notices = Notices(shell, notice)

    def load(self) -> None:
        self._registrations.magic(self.gpu, "line", "gpu")
        self._registrations.magic(self.burst, "cell", "gpu")
        self._registrations.magic(self.cpu, "cell", "cpu")
        cell_transform = make_cell_transform(cell_magic, leading_empty_lines, measures=False)
        self._registrations.item(self._shell.input_transformers_cleanup, cell_transform)
        self._registrations.callback("pre_run_cell", self._before_cell)
        self._notices.install(self._registrations)

    def unload(self) -> None:
        self._registrations.undo()

    def become_inert(self) -> None:
        """Do nothing, because a forked child has nothing to undo."""

    def gpu(self, line: str) -> None:
        del line  # every command has the same answer
        print(f"{self._notice} {NO_LEASE}".strip())  # noqa: T201 - a magic prints

    def burst(self, line: str, cell: str) -> None:
        """Run the cell. Only `run_cell_magic` calls this: in a notebook, the `%%gpu` line is removed before the cell runs."""
        self._shell.run_cell(f"%%gpu {line}\n{cell}").raise_error()

    def cpu(self, line: str, cell: str) -> None:
        """Run the cell. Only `run_cell_magic` calls this, for the same reason as `burst`."""
        del line
        self._shell.run_cell(f"%%cpu\n{cell}").raise_error()

    def _before_cell(self, info: Any) -> None:  # noqa: ANN401 - IPython is untyped
        first = info.raw_cell.lstrip().partition("\n")[0].split() if isinstance(info.raw_cell, str) else []
        if first[:1] == ["%%gpu"]:
            runs = MEASURE_RUNS if is_measure(" ".join(first[1:])) else BURST_RUNS
            publish(self._shell, Sentence(f"{runs} {NO_LEASE}"))
