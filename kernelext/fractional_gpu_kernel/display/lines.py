"""Lines of text in a cell's output, as HTML and plain text: sentences, lines that are updated in place, wait messages and notices."""

import contextvars
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fractional_gpu_kernel.registrations import Registrations

if TYPE_CHECKING:
    from fractional_gpu.core.model import Span
    from fractional_gpu.protocol.messages import Progress
    from fractional_gpu.protocol.status import LeaseStatus

Bundle = dict[str, Any]
WAIT_TYPE = "application/vnd.jupyter-gpu.wait+json"

SIMULATED = "JUPYTER_GPU_SIMULATED_DIR"


class View:
    """A cell's output, as plain text (its `repr`) and as HTML."""

    def html(self) -> str:
        raise NotImplementedError

    def bundle(self) -> Bundle:
        return {"text/plain": repr(self), "text/html": self.html()}


class Sentence(View):
    """A single sentence shown as output. Its heading says "simulated" on a simulated GPU."""

    def __init__(self, text: str, more: Bundle | None = None) -> None:
        self.text, self._more = text, more or {}
        self._speaker = "simulated gpu" if os.environ.get(SIMULATED) else "gpu"

    def __repr__(self) -> str:
        return f"[{self._speaker}] {self.text}"

    def bundle(self) -> Bundle:
        return {**super().bundle(), **self._more}

    def html(self) -> str:
        from html import escape  # noqa: PLC0415 - off the kernel's start

        speaker = self._speaker.replace("gpu", "GPU")
        return f'<div style="opacity:.75;font-size:90%"><b>{speaker}</b> {escape(self.text)}</div>'


class LiveLine:
    """A line of output that any thread can update in place. It belongs to the cell in which it is first shown."""

    def __init__(self, shell: Any) -> None:  # noqa: ANN401 - IPython's shells are untyped
        self._shell = shell
        self._display_id = os.urandom(16).hex()
        self._shown: str | None = None

    def show(self, text: str, wait: Bundle | None = None) -> None:
        """Show this text. For text about a wait, `wait` is its machine-readable form, which is sent along with it."""
        if text != self._shown:
            update, self._shown = self._shown is not None, text
            publish(self._shell, Sentence(text, wait), display_id=self._display_id, update=update)

    def blank(self) -> None:
        """Clear the line's text, but keep the cell's other output."""
        if self._shown is not None:
            self._shown = None
            publish(self._shell, None, display_id=self._display_id, update=True)

    def remove(self) -> None:
        """Clear the whole output. Call this for a cell that has not run, so that no other output is lost."""
        if self._shown is not None:
            self._shown = None
            self._shell.display_pub.clear_output(wait=False)


class CellLine:
    """A line below a running cell. Other threads write to it, and `close` clears it."""

    def __init__(self, line: LiveLine, context: contextvars.Context) -> None:
        self._line, self._context = line, context
        self._lock, self._is_closed = threading.Lock(), False

    def show(self, text: str, wait: Bundle | None = None) -> None:
        with self._lock:
            if not self._is_closed:
                self._context.copy().run(self._line.show, text, wait)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._context.copy().run(self._line.blank)


def publish(shell: Any, view: View | None, *, display_id: str | None = None, update: bool = False) -> None:  # noqa: ANN401 - as above
    publisher = shell.display_pub
    hooked = hasattr(publisher, "register_hook")  # not in a terminal, nor beneath `%%capture`
    if hooked:
        publisher.register_hook(_as_no_result)  # only in this thread
    try:
        transient = {"display_id": display_id} if display_id else {}
        data = {"text/plain": "", "text/html": ""} if view is None else view.bundle()
        publisher.publish(data=data, metadata={}, transient=transient, update=update)
    finally:
        if hooked:
            publisher.unregister_hook(_as_no_result)


def _as_no_result(message: dict[str, Any]) -> dict[str, Any]:
    # JupyterLab's debugger inspects all variables after each message of an `execute_request`. This could use the GPU in an idle kernel.
    if parent := message["parent_header"]:
        message["parent_header"] = {**parent, "msg_type": "display_data"}
    return message


def rendered(error: BaseException) -> BaseException:
    """Make IPython show the error as one sentence, because its traceback would only show this package's code."""
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]
    return error


_NEXT = {  # by the reason for the wait
    "wait.busy-neighbour": "When a busy kernel finishes its cell{turn}, its memory is saved to host memory, and {next_one} takes its place",
    "wait.user-limit": "It continues when another kernel of yours gives its share back",
    "wait.group-limit": "It continues when another kernel of your group gives its share back",
    "broker-silent": "The cell continues once the broker is responding again",
    "wait.device-draining": "It continues when the administrator allows kernels on the device again",
}


def wait_text(progress: "Progress", *, waited_s: float, age_s: float, preempted: bool = False) -> str:
    """Return the line to show below a waiting cell.

    `preempted` means that the cell has already started. `age_s` is the time in seconds since the broker sent `progress`.
    """
    from fractional_gpu.core.units import format_rough  # noqa: PLC0415 - off the kernel's start

    facts = [f"place {progress.position} in the queue"] if progress.position is not None else []
    if forecast := _left(progress, int(age_s * 1000)):
        facts.append(forecast)
    elif waited_s >= 10:
        facts.append(f"{format_rough(int(waited_s * 1000))} so far")
    about = "".join(f", {fact}" for fact in facts)
    why = (progress.sentence or "the GPU is in use").rstrip(".")
    turn_ms = 0 if progress.turn_ms is None else progress.turn_ms - int(age_s * 1000)
    turn = f", or when its turn ends, in about {format_rough(turn_ms)}" if turn_ms >= 1000 else ""
    next_one = "this kernel" if progress.position in {None, 1} else "the first kernel in the queue"
    after = f" {_NEXT[progress.reason]}.".format(turn=turn, next_one=next_one) if progress.reason in _NEXT else ""
    slowdown = f" It {progress.slowdown_brief}." if progress.slowdown_brief else ""
    does, end = "is waiting for the GPU", "Interrupt the kernel to stop waiting."
    if preempted:
        does = "gave the GPU to another kernel and will get it back"
        end = "If it uses the GPU before then, it will wait."
    return f"This cell {does}{about}: {why}.{after}{slowdown} {end}"


def wait_bundle(progress: "Progress", *, waited_s: float, age_s: float) -> Bundle:
    """Return the machine-readable form of a wait (version 1). docs/agents.md describes its fields."""
    left = {
        name: None if ms is None else max(0, ms - int(age_s * 1000))
        for name in ("expected_ms", "low_ms", "high_ms")
        for ms in (getattr(progress, name),)
    }
    return {
        WAIT_TYPE: {
            "version": 1,
            "position": progress.position,
            **left,
            "waited_ms": int(waited_s * 1000),
            "reason": progress.reason,
            "sentence": progress.sentence,
            "blockers": list(progress.blockers),
        }
    }


def resizing(status: "LeaseStatus") -> str:
    left = "" if status.expected is None else _left(status.expected, 0)
    place = f"place {status.position} in the queue" if status.position is not None else ""
    about = "".join(f", {fact}" for fact in (place, left) if fact)
    why = f": {status.sentence.rstrip('.')}" if status.position is not None and status.sentence else ""
    return (
        f"This kernel is waiting for its new share{about}{why}. Idle kernels on the same GPU make room. Interrupt the kernel to stop "
        "waiting."
    )


def _left(forecast: "Progress | Span", passed_ms: int) -> str:
    """Describe how much longer the wait should take, given a forecast made `passed_ms` ago. Return "" if there is no forecast."""
    from fractional_gpu.core.units import format_forecast, format_rough  # noqa: PLC0415 - off the kernel's start

    if forecast.expected_ms is None:
        return ""
    expected_ms = forecast.expected_ms - passed_ms
    low_ms, high_ms = (None if one is None else one - passed_ms for one in (forecast.low_ms, forecast.high_ms))
    if expected_ms > 0:
        return format_forecast(expected_ms, low_ms, high_ms, more=True)
    late = "longer than expected"
    return late if high_ms is None or high_ms < 1000 else f"{late}, up to {format_rough(high_ms)} more"


class Notices:
    """Shows sentences from the broker and the extension. This class is thread-safe.

    A notice that arrives before the first cell appears above that cell's output. A notice that arrives during a cell appears when the cell
    ends, or at once if it is urgent because the GPU is being taken away. While the kernel is idle, a notice is shown below the last cell
    until the next cell starts.

    Only cells stored in the history are considered, because users do not see the output of others (`%%capture`, `run_cell`). Cells in
    subshells run concurrently: the kernel is idle once the last of them has ended, and urgent notices appear in the cell that started last.
    """

    def __init__(self, shell: Any, first: str = "") -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._lock = threading.Lock()
        # The sentences by topic. A sentence without a topic is its own topic.
        self._kept = {first: first} if first else {}
        self._last_cell: contextvars.Context | None = None  # while the kernel is idle, notices appear below this cell
        self._running: dict[int, contextvars.Context] = {}  # the running cells by thread, in order of their start
        self._cell_lines: dict[int, CellLine] = {}  # the lines below running cells, by thread
        self._shown: dict[str, LiveLine] = {}  # the notices below the last cell, by topic

    def install(self, registrations: Registrations) -> None:
        registrations.callback("pre_run_cell", self._before_cell)
        registrations.callback("post_run_cell", self._after_cell)

    def add(self, sentence: str, topic: str = "") -> None:
        """Show or queue a sentence. It replaces any sentence with the same `topic` that is queued or shown below the last cell."""
        if not sentence:
            return
        key = topic or sentence
        with self._lock:
            self._kept.pop(key, None)
            line = self._shown.get(key) or LiveLine(self._shell)
            with suppress(*_failures()):  # if this thread cannot open a socket, the main thread shows the notice later
                if self._last_cell is not None:
                    self._last_cell.copy().run(line.show, sentence)
                    self._shown[key] = line
                    return
            self._kept[key] = sentence

    def add_urgent(self, sentence: str, topic: str = "") -> None:
        """Show a sentence now. If a cell is running, the sentence stays in that cell's output. `topic` means the same as in `add`."""
        with self._lock:
            cell = next(reversed(self._running.values()), None)
        with suppress(*_failures()):  # as in `add`
            if cell is not None and sentence:
                cell.copy().run(publish, self._shell, Sentence(sentence))
                return
        self.add(sentence, topic)

    def line_in_cell(self) -> CellLine | None:
        """Return a line below the cell that started last, or None if no cell is running."""
        with self._lock:
            if not self._running:
                return None
            thread, cell = next(reversed(self._running.items()))
            self._cell_lines[thread] = line = CellLine(LiveLine(self._shell), cell)
            return line

    def _before_cell(self, info: Any) -> None:  # noqa: ANN401 - IPython is untyped
        if not info.store_history:
            return
        with self._lock:
            self._running[threading.get_ident()] = contextvars.copy_context()
            cell, self._last_cell = self._last_cell, None
            shown, self._shown = self._shown, {}
            kept, self._kept = self._kept, {}
        if cell is not None:
            for line in shown.values():
                cell.copy().run(line.blank)
        for sentence in kept.values():
            publish(self._shell, Sentence(sentence))

    def _after_cell(self, result: Any) -> None:  # noqa: ANN401 - as above
        if result is not None and not result.info.store_history:  # it is None if the cell was cancelled
            return
        with self._lock:
            line = self._cell_lines.pop(threading.get_ident(), None)
            self._running.pop(threading.get_ident(), None)  # for blank cells there is no event at the start
            if not self._running:
                self._last_cell = contextvars.copy_context()
            kept, self._kept = self._kept, {}
        if line is not None:
            line.close()
        for sentence in kept.values():
            publish(self._shell, Sentence(sentence))


def _failures() -> tuple[type[Exception], ...]:
    """Return the types of errors raised when a message is published and the process has run out of file descriptors."""
    zmq = sys.modules.get("zmq")
    return (OSError, RuntimeError) if zmq is None else (OSError, RuntimeError, zmq.ZMQError)
