"""The extension of a kernel without a lease: a `%gpu` that says so, and the sentence why, once."""

from typing import Any

from kernelext.notices import Notices
from kernelext.registrations import Registrations

__all__ = ["Bystander"]

NO_LEASE = (
    "This kernel has no share of a GPU. Pick a kernel with one, such as “Python 3 · 1/4 GPU”, in the launcher or the kernel menu; "
    "`jupyter gpu kernels install` makes them."
)


class Bystander:
    """What is loaded where there is no lease."""

    def __init__(self, shell: Any, notice: str) -> None:  # noqa: ANN401 - as above
        self._shell = shell
        self._registrations = Registrations(shell)
        self._notice = notice
        self._notices = Notices(shell, notice)

    def load(self) -> None:
        """Register the magic and the notice."""
        self._registrations.magic(self.gpu, "line", "gpu")
        self._registrations.magic(self.burst, "cell", "gpu")
        self._registrations.magic(self.cpu, "cell", "cpu")
        self._notices.install()

    def unload(self) -> None:
        """Leave the shell as it was."""
        self._notices.uninstall()
        self._registrations.undo()

    def become_inert(self) -> None:
        """A forked child needs nothing undone."""

    def gpu(self, line: str) -> None:
        """Say why there is no GPU share here."""
        del line  # whatever was asked, the answer is the same
        print(f"{self._notice} {NO_LEASE}".strip())  # noqa: T201 - a magic prints

    def burst(self, line: str, cell: str) -> None:
        """Refuse: there is no share that could be larger for this cell."""
        from IPython.core.error import UsageError  # noqa: PLC0415 - loaded already whenever this runs

        del cell
        raise UsageError(
            f"%%gpu {line.strip()[:50]}: this cell did not run. {self._notice} {NO_LEASE}".replace("  ", " ")
        )

    def cpu(self, line: str, cell: str) -> None:
        """Run the cell: without a lease no cell waits for a GPU."""
        del line
        self._shell.run_cell(cell).raise_error()
