"""What docstrings and comments name in backticks exists: a module, a name in the code, or a word of a text that the code uses."""

import ast
import keyword
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT, SOURCES

FOREIGN = {
    "ID", "NSpid", "PROCESS", "PrivateDevices", "ProcessPoolExecutor", "SetDevice", "TEARDOWN_CUPTI", "_OpNamespace", "cudaMemGetInfo",
    "cudaProfilerStart", "dockerspawner", "execv", "extra_pod_config", "fg", "grep", "ip_local_port_range", "kernel_info", "libcupti",
    "nohup", "profile_start", "restricted", "set_memory_growth", "sock_diag", "sudo", "supported_encryption", "ts", "x_",
}  # fmt: skip
"""Names of other programs and libraries that our code does not use."""
NAME = re.compile(r"`(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:\(\))?`")


def files() -> list[Path]:
    return sorted(path for source in SOURCES for path in source.rglob("*.py") if ".ipynb_checkpoints" not in path.parts)


def documentation(tree: ast.AST) -> Iterator[ast.stmt]:
    """The strings that stand alone at the level of the module, of classes and of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from documentation(node)


@cache
def parts(file: Path) -> tuple[dict[int, str], str]:
    """The file's prose by lines, and its code."""
    text = file.read_text(encoding="utf-8")
    lines = dict(enumerate(text.splitlines(), 1))
    prose: dict[int, str] = {}
    for node in documentation(ast.parse(text)):
        prose |= {number: lines.pop(number) for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    for number, line in lines.items():
        lines[number], _, comment = line.partition("#")
        prose[number] = comment
    return prose, "\n".join(lines.values())


@cache
def known() -> frozenset[str]:
    """All words of the code, its strings included, and the names of its modules and packages."""
    found = {*FOREIGN, *keyword.kwlist}
    for file in files():
        found |= {file.stem, file.parent.name, *re.findall(r"\w+", parts(file)[1])}
    return frozenset(found)


def test_what_is_named_exists() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {name}"
        for file in files()
        for number, line in parts(file)[0].items()
        for name in NAME.findall(line)
        if name not in known()
    ]
    assert not wrong, "docstrings or comments name what is not there:\n" + "\n".join(wrong)
