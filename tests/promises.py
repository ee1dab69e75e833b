"""List each promise of docs/promises.md with the tests that keep it: `python -m tests.promises [NAME]`."""

import ast
import re
import sys
from collections.abc import Iterator

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "promises.md"


def promised() -> dict[str, tuple[str, str]]:
    """Each promise's name, with its text and the longer command (empty if there is none)."""
    lines = re.findall(r"^- \*\*([\w-]+)\*\*(?: \((`.+?`)\))?: (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: (text, longer) for name, longer, text in lines}


def marked() -> dict[str, list[str]]:
    """Each name in a marker `pytest.mark.promise(...)`, with the modules and tests that carry it."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.promise" not in text:
            continue
        module = str(path.relative_to(ROOT))
        for where, names in _markers(ast.parse(text)):
            for name in names:
                found.setdefault(name, []).append(f"{module}{where}")
    return found


def _markers(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                yield "", _names(value)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                for decorator in node.decorator_list:
                    yield f"::{node.name}", _names(decorator)


def _names(expression: ast.expr) -> list[str]:
    return [
        ast.literal_eval(name)
        for node in ast.walk(expression)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise"
        for name in node.args
    ]


def faults(promises: dict[str, tuple[str, str]], tests: dict[str, list[str]]) -> list[str]:
    """What does not fit together, one sentence each."""
    return [f"No test keeps the promise {name}." for name in promises if name not in tests] + [
        f"{places[0]} names the promise {name}, which docs/promises.md does not have."
        for name, places in tests.items()
        if name not in promises
    ]


def main(names: list[str]) -> int:
    promises, tests = promised(), marked()
    for name in names or promises:
        text, longer = promises.get(name, ("This is no promise.", ""))
        print(f"{name}: {text}", *(f"  {place}" for place in tests.get(name, ())), sep="\n")
        if longer:
            print(f"  longer: {longer}")
    problems = faults(promises, tests)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems or not promises.keys() >= set(names) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
