"""Which cells need the GPU, decided from their text.

A cell runs without the GPU in three cases only: all its statements are `%gpu` lines (or help about our magics), it begins with `%%cpu`,
or it has only comments. Every other cell needs it, in doubt too: an unnecessary wait costs seconds, while a cell that runs without the
GPU it needs blocks its kernel.

The decision is made on the text *after* IPython's transformations, where `%gpu`, automagic `gpu`, indentation and pasted prompts all have
one form. `%%cpu` becomes a comment (`SENTINEL`) in that text, so the rest of such a cell is an ordinary cell: top-level `await`, the
value of its last line and another cell magic all work in it. `%%gpu FRACTION` becomes one (`BURST`) in the same way.
"""

import ast
import re
from collections.abc import Callable

__all__ = ["BURST", "SENTINEL", "burst_of", "make_cell_transform", "needs_gpu"]

SENTINEL = "#%%cpu: this cell runs without waiting for the GPU\n"
BURST = "#%%gpu "
_OWN_MAGIC = re.compile(r"run_line_magic\('(?:gpu|pinfo2?)'")
_COMMENT_MAY_BEGIN = ("#", " ", "\t")
_HELP_TOPICS = ("%gpu", "%%gpu", "%%cpu")

LinesTransform = Callable[[list[str]], list[str]]


def needs_gpu(transformed: str) -> bool:
    """Return whether a cell, given as IPython's transformed text, has to wait for the GPU before it runs."""
    if transformed.startswith(SENTINEL):
        return False
    if transformed[:1] in _COMMENT_MAY_BEGIN and _is_comment(transformed):
        return False
    # Nearly every cell ends here: parsing costs more than searching.
    if not _OWN_MAGIC.search(transformed) or transformed.startswith(BURST):
        return True
    try:
        body = ast.parse(transformed).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return not all(isinstance(statement, ast.Expr) and _is_own_magic(statement.value) for statement in body)


def _is_comment(transformed: str) -> bool:
    """Whether the text has only comments. A burst counts as a cell that runs, though it begins with a comment."""
    lines = (line.strip() for line in transformed.splitlines())
    return not transformed.startswith(BURST) and all(not line or line.startswith("#") for line in lines)


def _is_own_magic(node: ast.expr) -> bool:
    """Whether the expression is `get_ipython().run_line_magic('gpu', TEXT)` (or help about it) and evaluates nothing else."""
    match node:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(func=ast.Name(id="get_ipython"), args=[], keywords=[]), attr="run_line_magic"
            ),
            args=[ast.Constant(value=str(name)), ast.Constant(value=str(line))],
            keywords=[],
        ):
            pass
        case _:
            return False
    if name in ("pinfo", "pinfo2"):
        return line.strip() in _HELP_TOPICS
    # IPython expands {expression} and $variable in a magic's line: that is user code, and it may use the GPU.
    return name == "gpu" and "{" not in line and "$" not in line


def burst_of(transformed: str) -> str | None:
    """Return what stands behind `%%gpu` if the cell, given as IPython's transformed text, begins with it."""
    if not transformed.startswith(BURST):  # nearly every cell
        return None
    return transformed.partition("\n")[0].removeprefix(BURST).strip()


def make_cell_transform(cell_magic: LinesTransform, leading_empty_lines: LinesTransform) -> LinesTransform:
    """Return the line transformation that turns a leading `%%cpu` or `%%gpu ...` into its comment.

    It stands before IPython's `cell_magic` and calls it for what follows, so that ours may stand above another cell magic.
    """

    def own_cell(lines: list[str]) -> list[str]:
        comment = _comment(lines[0]) if lines and lines[0].startswith("%%") else ""
        if not comment:  # nearly every cell
            return lines
        rest = lines[1:]
        below = leading_empty_lines(rest)
        if below and below[0].startswith("%%"):
            rest = cell_magic(own_cell(below))
        return [comment, *rest]

    return own_cell


def _comment(line: str) -> str:
    """Return what takes the place of a cell's first line, "" if it is not ours."""
    if line.startswith("%%cpu") and line.strip() == "%%cpu":
        return SENTINEL
    name, _, arguments = line.rstrip().partition(" ")
    return f"{BURST}{arguments}\n" if name == "%%gpu" else ""
