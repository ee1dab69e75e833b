"""`%%gpu` as the guard meets it: what stands behind it is read, what goes wrong is said to the person at the notebook."""

from typing import Any

from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu_kernel.cells.acquire import explain
from fractional_gpu_kernel.cells.wait import RefusedError
from fractional_gpu_kernel.display.display import LiveLine, Sentence, publish
from fractional_gpu_kernel.magics.arguments import (
    ArgumentsError,
    HelpAsked,
    parse_burst,
    size,
)
from fractional_gpu_kernel.magics.resize import Size, Sizes

__all__ = ["CellBursts"]


class CellBursts:
    """The bursts of one shell's cells."""

    def __init__(self, shell: Any, sizes: Sizes) -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._sizes = sizes

    def begin(self, mark: object, text: str, line: LiveLine | None) -> None:
        """Have the share that `text` asks for until `end`. Raises RefusedError or KeyboardInterrupt."""
        try:
            arguments = parse_burst(text)
            milli, memory_mib = size("%%gpu", arguments.fraction, arguments.memory)
            self._sizes.begin(mark, Size(milli or 0, memory_mib), line)
        except ArgumentsError as error:
            raise RefusedError(str(error)) from None
        except HelpAsked as text_asked:
            raise RefusedError(f"It asked for help:\n{text_asked}") from None
        except FractionalGPUError as error:
            raise RefusedError(explain(error)) from None

    def end(self, mark: object, *, silent: bool) -> None:
        """A cell is over: a burst of it, and what earlier ones still owe, is given back."""

        def say(sentence: str) -> None:
            if not silent:
                publish(self._shell, Sentence(sentence))

        self._sizes.end(mark, say)
