"""The extension of a kernel without a lease: a `%gpu` that says so, and the sentence why, once."""

from typing import Any

__all__ = ["Bystander", "Notices"]

NO_LEASE = (
    "This kernel has no share of a GPU. Pick a kernel with one, such as “Python 3 · 1/4 GPU”, in the launcher or the kernel menu; "
    "`jupyter gpu kernels install` makes them."
)


class Notices:
    """Sentences to show once, above the next cell's output. `add` may be called from any thread."""

    def __init__(self, shell: Any, first: str = "") -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._sentences = [first] if first else []

    def add(self, sentence: str) -> None:
        """Keep a sentence for the next cell."""
        if sentence and sentence not in self._sentences:
            self._sentences.append(sentence)

    def show(self, _info: object) -> None:
        """`pre_run_cell`, which fires for what a person runs and not for silent requests."""
        if self._sentences:
            from kernelext.display import Sentence, publish  # noqa: PLC0415 - off the kernel's start

            sentences, self._sentences = self._sentences, []
            for sentence in sentences:
                publish(self._shell, Sentence(sentence))


class Bystander:
    """What is loaded where there is no lease."""

    def __init__(self, shell: Any, notice: str) -> None:  # noqa: ANN401 - as above
        self._shell = shell
        self._notice = notice
        self._notices = Notices(shell, notice)

    def load(self) -> None:
        """Register the magic and the notice."""
        self._shell.register_magic_function(self.gpu, "line", "gpu")
        self._shell.register_magic_function(self.cpu, "cell", "cpu")
        self._shell.events.register("pre_run_cell", self._notices.show)

    def unload(self) -> None:
        """Leave the shell as it was."""
        self._shell.events.unregister("pre_run_cell", self._notices.show)
        del self._shell.magics_manager.magics["line"]["gpu"], self._shell.magics_manager.magics["cell"]["cpu"]

    def become_inert(self) -> None:
        """A forked child needs nothing undone."""

    def gpu(self, line: str) -> None:
        """Say why there is no GPU share here."""
        del line  # whatever was asked, the answer is the same
        print(f"{self._notice} {NO_LEASE}".strip())  # noqa: T201 - a magic prints

    def cpu(self, line: str, cell: str) -> None:
        """Run the cell: without a lease no cell waits for a GPU."""
        del line
        self._shell.run_cell(cell).raise_error()
