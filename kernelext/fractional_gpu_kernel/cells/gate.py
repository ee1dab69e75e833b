"""A kernel's gate. It tracks whether cells may run, whether one is running, and whether it needs the GPU. It has one lock and does no I/O.

Each operation is a single step under the lock, so a cell cannot slip in ahead of an answer to the broker:

    open              binds the process to its device, and lets waiting cells enter
    close             shuts the gate; if a cell is running or waiting, it changes nothing and answers "busy"
    preempt           shuts the gate even while cells are running; their GPU calls block until the kernel's state is restored
    enter, leave      a cell that enters the open gate counts as running until it leaves
    exempt, leave     a cell that does not need the GPU ignores the gate, and never keeps it open
    start_waiting,    a waiting cell counts as busy from the start; it enters in the step that ends its wait, so no `close` can intervene
    stop_waiting
    pause, go_on      a cell that waits for input does not count as running; it re-enters when it gets the input

The gate is shut until the first grant. If the pool lets a cell overlap with its kernel's resume, the cell enters the gate while it is still
shut. In a forked child, the gate is inert, meaning it is always open.
"""

import ast
import re
import threading
from collections.abc import Callable, Iterable, Mapping


class Gate:
    """One kernel's gate. Before it opens, `binders` are called with the variables that bind the process to its device.

    `is_open` and `is_inert` are read-only. `is_inert` is set if this process is a forked child without a lease.
    """

    def __init__(self, *binders: Callable[[Mapping[str, str]], None]) -> None:
        self._binders = binders
        self._lock = threading.Lock()
        self.is_open = False
        self.is_inert = False
        self._was_open = False
        # The marks of cells. Each mark is in at most one set. Leaving twice, or without having entered, changes nothing.
        self._running: set[object] = set()
        self._paused: set[object] = set()  # cells that wait for input
        self._exempt: set[object] = set()  # cells that run without the GPU
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_shut_again(self) -> bool:
        """Whether the gate has been opened and shut again, in which case the kernel may have GPU state."""
        return self._was_open and not self.is_open

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def is_exempt(self) -> bool:
        return bool(self._exempt) and not self._running

    def runs_beside(self, mark: object) -> bool:
        """Return whether any cell besides `mark` is running, such as an outer cell or one in another subshell."""
        return any(one is not mark for one in list(self._running))

    def enter(self, mark: object) -> bool:
        with self._lock:
            if self.is_open:
                self._running.add(mark)
            return self.is_open

    def exempt(self, mark: object) -> None:
        with self._lock:
            self._exempt.add(mark)

    def leave(self, mark: object) -> None:
        with self._lock:
            self._exempt.discard(mark)
            self._running.discard(mark)
            self._paused.discard(mark)

    def start_waiting(self, on_open: Callable[[], None]) -> None:
        """Call `on_open` each time the gate opens, or at once if it is open now. `on_open` runs under the lock, so it must not block."""
        with self._lock:
            self._waiting.append(on_open)
            if self.is_open:
                on_open()

    def stop_waiting(self, on_open: Callable[[], None], mark: object | None, *, overlap: bool = False) -> bool:
        """Stop waiting. If the gate is open or `overlap` is set, return True and, unless `mark` is None, record it as running."""
        with self._lock:
            self._waiting.remove(on_open)
            may_enter = self.is_open or overlap
            if mark is not None and may_enter:
                self._running.add(mark)
            return may_enter

    def pause(self, marks: Iterable[object]) -> list[object]:
        """Record that these cells are waiting for input. Return the ones that were running, in the given order."""
        with self._lock:
            paused = [mark for mark in marks if mark in self._running]
            self._running.difference_update(paused)
            self._paused.update(paused)
            return paused

    def go_on(self, marks: Iterable[object], *, if_open: bool = False) -> bool:
        with self._lock:
            may_go_on = self.is_open or not if_open
            paused = self._paused.intersection(marks) if may_go_on else set()
            self._paused -= paused
            self._running |= paused
            return may_go_on

    def close(self) -> str:
        with self._lock:
            if self._running or self._waiting:
                return "busy"
            self.is_open = False
            return "closed"

    def preempt(self) -> str:
        with self._lock:
            self.is_open = self.is_inert
            return "closed"

    def bind(self, environment: Mapping[str, str]) -> None:
        with self._lock:
            if not self.is_inert:
                self._bind(environment)

    def open(self, environment: Mapping[str, str], still_wanted: Callable[[], bool] | None = None) -> bool:
        """Bind the process to its device and let cells run. Return whether the gate is open.

        Grants and commands arrive on different connections. For a grant, the caller passes `still_wanted`, because a late grant must not
        open a gate that was shut in the meantime.
        """
        with self._lock:
            if self.is_inert or (still_wanted is not None and not still_wanted()):
                return False
            self._bind(environment)
            self.is_open = self._was_open = True
            for on_open in self._waiting:
                on_open()
            return True

    def _bind(self, environment: Mapping[str, str]) -> None:
        for bind in self._binders:
            bind(environment)

    def become_inert(self) -> None:
        """Make the gate inert in a forked child. Replace the lock, because another thread in the parent may have held it."""
        self._lock = threading.Lock()
        self.is_inert = True
        self.is_open = True
        self._paused = set()
        self._exempt = set()
        self._waiting = []


# Which cells need the GPU. We look at the text after IPython's transformations. There, `%gpu`, automagic `gpu`, indentation and pasted
# prompts have the same form, and `%%cpu` and `%%gpu FRACTION` are comments above an ordinary cell.
#
# A cell does not need the GPU if it begins with `%%cpu`, or if it has only comments, `%gpu` lines, help about our magics or `%%gpu
# measure`, whose code runs in other processes. If in doubt, we assume that a cell needs the GPU, because an unnecessary wait costs only
# seconds, but a cell without its GPU blocks the kernel.

SENTINEL = "#%%cpu: this cell runs without waiting for the GPU\n"
BURST = "#%%gpu "
_OWN_MAGIC = r"run_(?:line_magic\('(?:gpu|pinfo2?)'|cell_magic\('gpu')"
_COMMENT_MAY_BEGIN = ("#", " ", "\t")
_HELP_TOPICS = ("%gpu", "%%gpu", "%%cpu")

LinesTransform = Callable[[list[str]], list[str]]


def needs_gpu(transformed: str) -> bool:
    if transformed.startswith(SENTINEL):
        return False
    lines = transformed.splitlines() if transformed[:1] in _COMMENT_MAY_BEGIN else ["code"]
    is_burst = transformed.startswith(BURST)  # this cell has code, although it begins with a comment
    if not is_burst and all(not line.strip() or line.lstrip().startswith("#") for line in lines):
        return False
    # The cheapest test comes first and is enough for most cells.
    if "_magic('" not in transformed or is_burst or not re.search(_OWN_MAGIC, transformed):
        return True
    try:
        body = ast.parse(transformed).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return not all(isinstance(statement, ast.Expr) and _is_own_magic(statement.value) for statement in body)


def _is_own_magic(node: ast.expr) -> bool:
    """Return whether the expression is just `get_ipython().run_line_magic('gpu', TEXT)`, help about our magics, or `%%gpu measure`."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython"), args=[], keywords=[]), attr=attr),
            args=[ast.Constant(value=str(name)), ast.Constant(value=str(line)), *cell],
            keywords=[],
        ):
            pass
        case _:
            return False
    if name in ("pinfo", "pinfo2"):
        return attr == "run_line_magic" and not cell and line.strip() in _HELP_TOPICS
    # IPython expands {expression} and $variable in the line of a magic. This is user code, which may use the GPU.
    if name != "gpu" or "{" in line or "$" in line:
        return False
    if attr == "run_cell_magic":
        return len(cell) == 1 and isinstance(cell[0], ast.Constant) and is_measure(line)
    return attr == "run_line_magic" and not cell


def burst_of(transformed: str) -> str | None:
    if not transformed.startswith(BURST):  # nearly every cell
        return None
    return transformed.partition("\n")[0].removeprefix(BURST).strip()


def is_measure(line: str) -> bool:
    return line.split()[:1] == ["measure"]


def make_cell_transform(
    cell_magic: LinesTransform, leading_empty_lines: LinesTransform, *, measures: bool = True
) -> LinesTransform:
    """Return the line transformation that turns a leading `%%cpu` or `%%gpu ...` into a comment.

    If the lines below begin with another cell magic, IPython's `cell_magic` handles them. If `measures` is set, a leading `%%gpu measure`
    is kept.
    """

    def own_cell(lines: list[str]) -> list[str]:
        comment = _comment(lines[0], measures=measures) if lines and lines[0].startswith("%%") else ""
        if not comment:  # nearly every cell
            return lines
        rest = lines[1:]
        below = leading_empty_lines(rest)
        if below and below[0].startswith("%%"):
            rest = cell_magic(own_cell(below))
        return [comment, *rest]

    return own_cell


def _comment(line: str, *, measures: bool) -> str:
    if line.startswith("%%cpu") and line.strip() == "%%cpu":
        return SENTINEL
    name, _, arguments = line.rstrip().partition(" ")
    if name != "%%gpu" or (measures and is_measure(arguments)):
        return ""
    return f"{BURST}{arguments}\n"
