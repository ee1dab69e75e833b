"""What a person sees: each thing once for notebooks (HTML) and once as plain text (consoles, logs, screen readers)."""

import os
from typing import Any, Protocol

__all__ = ["Blank", "Bundle", "LiveLine", "Sentence", "View", "publish", "rendered"]

Bundle = dict[str, str]

SIMULATED = "JUPYTER_GPU_SIMULATED_DIR"


class View(Protocol):
    """Something that can be shown."""

    def bundle(self) -> Bundle:
        """Return it as MIME type -> text; "text/plain" is always there."""


class Sentence:
    """One line that the GPU side says. In a kernel on a simulated GPU it says so."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._speaker = "simulated gpu" if os.environ.get(SIMULATED) else "gpu"

    def __repr__(self) -> str:
        return f"[{self._speaker}] {self.text}"

    def bundle(self) -> Bundle:
        """Return text and HTML."""
        import html  # noqa: PLC0415 - off the kernel's start

        speaker = self._speaker.replace("gpu", "GPU")
        line = f'<div style="opacity:.75;font-size:90%"><b>{speaker}</b> {html.escape(self.text)}</div>'
        return {"text/plain": repr(self), "text/html": line}


class Blank:
    """Nothing, in the place of something that was shown."""

    def bundle(self) -> Bundle:
        """Return no text."""
        return {"text/plain": "", "text/html": ""}


class LiveLine:
    """One line of output that changes in place. May be used from any thread; the first `show` decides the cell it belongs to."""

    def __init__(self, shell: Any) -> None:  # noqa: ANN401 - IPython's shells are untyped
        self._shell = shell
        self._display_id = os.urandom(16).hex()
        self._shown: str | None = None

    @property
    def is_shown(self) -> bool:
        """Whether there is a line on the screen."""
        return self._shown is not None

    def show(self, text: str) -> None:
        """Show `text`, in place of what the line said before."""
        if text != self._shown:
            update, self._shown = self.is_shown, text
            publish(self._shell, Sentence(text), display_id=self._display_id, update=update)

    def blank(self) -> None:
        """Leave nothing to read in the line's place: for a line beneath other output."""
        if self.is_shown:
            self._shown = None
            publish(self._shell, Blank(), display_id=self._display_id, update=True)

    def remove(self) -> None:
        """Clear the cell's output if a line is shown: for a line that stands before the cell has run, where nothing else is."""
        if self.is_shown:
            self._shown = None
            self._shell.display_pub.clear_output(wait=False)


def publish(shell: Any, view: View, *, display_id: str | None = None, update: bool = False) -> None:  # noqa: ANN401 - as above
    """Publish a view as this cell's output."""
    transient = {"display_id": display_id} if display_id else {}
    shell.display_pub.publish(data=view.bundle(), metadata={}, transient=transient, update=update)


def rendered(error: BaseException) -> BaseException:
    """Let IPython show the error as one sentence: the stack would be ours, not the user's."""
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]
    return error
