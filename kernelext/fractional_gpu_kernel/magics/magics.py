"""The IPython magics `%gpu`, `%%gpu` and `%%cpu`. `actions` does the work, and is imported on first use.

A cell that contains only `%gpu` lines never waits for the GPU and does not count as running, so the gate can be shut while it runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from IPython.core.completer import SimpleCompletion, context_matcher

from fractional_gpu_kernel.cells.acquire import RefusedError
from fractional_gpu_kernel.cells.gate import is_measure
from fractional_gpu_kernel.display.lines import rendered
from fractional_gpu_kernel.settings import explain

if TYPE_CHECKING:
    from fractional_gpu_kernel.extension import LeasedKernel
    from fractional_gpu_kernel.magics.actions import Actions, Resizer
    from fractional_gpu_kernel.magics.arguments import Completer


class GPURequestError(Exception):
    """Raised if a valid command is refused by the broker or by a pool's policy."""


class Magics:
    def __init__(self, kernel: "LeasedKernel") -> None:
        self._kernel = kernel
        self._shell = kernel.shell

    def install(self) -> None:
        registrations = self._kernel.registrations
        registrations.magic(self.gpu, "line", "gpu")
        registrations.magic(self.burst, "cell", "gpu")
        registrations.magic(self.cpu, "cell", "cpu")
        registrations.item(self._shell.Completer.custom_matchers, self.complete)

    def stop(self) -> None:
        if "actions" in vars(self):  # a command was given
            self.actions.stop()

    @cached_property
    def resizer(self) -> "Resizer":
        from fractional_gpu_kernel.magics.actions import Resizer  # noqa: PLC0415 - off the kernel's start

        return Resizer(self._kernel)

    @cached_property
    def actions(self) -> "Actions":
        from fractional_gpu_kernel.magics.actions import Actions  # noqa: PLC0415 - off the kernel's start

        return Actions(self._kernel)

    @cached_property
    def completer(self) -> "Completer":
        from fractional_gpu_kernel.magics.arguments import Completer  # noqa: PLC0415 - off the kernel's start

        return Completer(self._kernel.settings)

    def gpu(self, line: str) -> None:
        """Show and control this kernel's share of a GPU.

        %gpu                     this kernel's share: memory, state, neighbours
        %gpu resize 1/2          another share, without a restart (request: and wait for the GPU)
        %gpu suspend | resume    free the GPU and keep every variable | come back
        %gpu pin 30m | unpin     stay on the GPU for a while | no longer
        %gpu top                 the GPUs of this machine, and who is on them
        %gpu history | explain   memory over time | why everything happened
        %gpu cost                what this kernel costs, and all your kernels today and this month
        %gpu help                all commands; %gpu COMMAND --help says more about one

        %%gpu 1                  run this cell with a larger share
        %%gpu measure            which share is enough for this cell; %gpu help measure
        """
        from fractional_gpu_kernel.magics.arguments import parse  # noqa: PLC0415 - off the kernel's start

        self._check_not_forked()
        with _told():
            arguments = parse(line)
            getattr(self.actions, arguments.name)(arguments)

    def burst(self, line: str, cell: str) -> None:
        """Run this cell with a larger share of the GPU, and give it back at the cell's end: %%gpu FRACTION [--memory SIZE].

        The cell waits for its share as it does for the GPU. The share is given back even if the cell fails or is interrupted.
        %%gpu measure instead finds out which share is enough for the cell, in separate processes; see %gpu help measure.

        With a FRACTION, only `run_cell_magic` calls this method: in a notebook, the `%%gpu` line is removed before the cell runs.
        """
        if not is_measure(line):
            self._shell.run_cell(f"%%gpu {line}\n{cell}").raise_error()
            return
        from fractional_gpu_kernel.magics.arguments import parse_measure  # noqa: PLC0415 - off the kernel's start
        from fractional_gpu_kernel.magics.measure_cell import measure_cell  # noqa: PLC0415 - as above

        self._check_not_forked()
        with _told():
            measure_cell(self._shell, self._kernel.settings, parse_measure(line), cell)

    def cpu(self, line: str, cell: str) -> None:
        """Run this cell without waiting for the GPU. The cell must not use the GPU.

        Only `run_cell_magic` calls this method: in a notebook, the `%%cpu` line is removed before the cell runs.
        """
        if line.strip():
            raise _usage_error(f"%%cpu takes no arguments; given: {line.strip()[:100]}")
        self._shell.run_cell("%%cpu\n" + cell).raise_error()

    @context_matcher(identifier="gpu_magic")  # type: ignore[untyped-decorator]
    def complete(self, context: Any) -> Any:  # noqa: ANN401 - IPython's completion context and result
        found = None
        if "%gpu" in context.text_until_cursor:
            found = self.completer.complete(context.text_until_cursor)
        if found is None:
            return {"completions": [], "suppress": False}
        fragment, proposed = found
        texts = [SimpleCompletion(text=text, type="magic") for text in proposed]
        return {"completions": texts, "suppress": True, "matched_fragment": fragment}

    def _check_not_forked(self) -> None:
        if self._kernel.gate.is_inert:
            raise _usage_error(
                "This is a forked child of the kernel, and the GPU share belongs to the parent. Use %gpu in the notebook."
            )


@contextmanager
def _told() -> Iterator[None]:
    from fractional_gpu.protocol.errors import FractionalGPUError  # noqa: PLC0415 - off the kernel's start
    from fractional_gpu_kernel.magics.arguments import ArgumentsError, HelpRequested  # noqa: PLC0415 - as above

    try:
        yield
    except HelpRequested as text:
        print(text)  # noqa: T201 - a magic prints
    except ArgumentsError as error:
        raise _usage_error(str(error)) from None
    except RefusedError as error:
        raise rendered(GPURequestError(str(error))) from None
    except FractionalGPUError as error:
        raise rendered(GPURequestError(explain(error))) from None


def _usage_error(message: str) -> Exception:
    from IPython.core.error import UsageError  # noqa: PLC0415 - loaded already whenever this runs

    error: Exception = UsageError(message)
    return error
