"""What a person sees: each thing once for notebooks (HTML) and once as plain text (consoles, logs, screen readers)."""

import html
import os
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provisioner.protocol.messages import LeaseStatus

__all__ = ["LiveLine", "Sentence", "StatusView"]

Bundle = dict[str, str]

SIMULATED = "JUPYTER_GPU_SIMULATED_DIR"

_STATES = {
    "unattached": "the broker does not know this kernel's process yet",
    "unarmed": "not on a GPU; the next cell waits for one if it has to",
    "resident": "on the GPU",
    "suspending": "being saved to host memory",
    "suspended": "saved in host memory; the next cell brings it back",
    "resuming": "on its way back to the GPU",
    "quarantined": "unclear: the broker does not know what is true on the GPU and is looking; nothing of it is touched meanwhile",
    "ended": "over; restart the kernel to get a new share",
}


class Sentence:
    """One line that the GPU side says. In a kernel on a simulated GPU it says so."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._speaker = "simulated gpu" if os.environ.get(SIMULATED) else "gpu"

    def __repr__(self) -> str:
        return f"[{self._speaker}] {self.text}"

    def bundle(self) -> Bundle:
        """Return text and HTML."""
        speaker = self._speaker.replace("gpu", "GPU")
        line = f'<div style="opacity:.75;font-size:90%"><b>{speaker}</b> {html.escape(self.text)}</div>'
        return {"text/plain": repr(self), "text/html": line}


class StatusView:
    """This kernel's share as `%gpu` shows it."""

    def __init__(self, status: "LeaseStatus") -> None:
        self._status = status

    def rows(self) -> list[tuple[str, str]]:
        """Return what there is to say, as (name, sentence)."""
        from provisioner.core.units import format_duration, format_fraction, format_memory  # noqa: PLC0415 - off the kernel's start

        status = self._status
        device = status.device_name or "none yet"
        state = _STATES.get(status.state, status.state)
        rows = [
            (
                "share",
                f"{format_fraction(status.fraction_milli)} GPU, {format_memory(status.reserve_mib)} of device memory, pool {status.pool}",
            ),
            ("state", f"{state} (for {format_duration(status.age_ms)})"),
            ("device", device + (" (simulated)" if status.simulated else "")),
            ("memory", f"{format_memory(status.used_mib)} of {format_memory(status.reserve_mib)} used"),
        ]
        if status.stays:
            rows.append(("stays", f"it is not suspended: {status.stays}"))
        if status.saved_mib:
            rows.append(("saved", f"{format_memory(status.saved_mib)} held in host memory"))
        if status.position is not None:
            rows.append(("queue", f"place {status.position}"))
        if status.suspends or status.resumes:
            rows.append(("so far", f"suspended {status.suspends} times, resumed {status.resumes} times"))
        if status.sentence:
            rows.append(("last", status.sentence))
        return rows

    def __repr__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def bundle(self) -> Bundle:
        """Return text and HTML."""
        cells = "".join(
            f'<tr><th style="text-align:left">{html.escape(name)}</th><td style="text-align:left">{html.escape(text)}</td></tr>'
            for name, text in self.rows()
        )
        return {"text/plain": repr(self), "text/html": f"<table>{cells}</table>"}


class LiveLine:
    """One line of output that changes in place. May be used from any thread; the first `show` decides the cell it belongs to."""

    def __init__(self, shell: Any) -> None:  # noqa: ANN401 - IPython's shells are untyped
        self._shell = shell
        self._display_id = uuid.uuid4().hex
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

    def remove(self) -> None:
        """Clear the cell's output if a line is shown: for a line that stands before the cell has run, where nothing else is."""
        if self.is_shown:
            self._shown = None
            self._shell.display_pub.clear_output(wait=False)


def publish(shell: Any, view: Sentence | StatusView, *, display_id: str | None = None, update: bool = False) -> None:  # noqa: ANN401 - as above
    """Publish a view as this cell's output."""
    transient = {"display_id": display_id} if display_id else {}
    shell.display_pub.publish(data=view.bundle(), metadata={}, transient=transient, update=update)
