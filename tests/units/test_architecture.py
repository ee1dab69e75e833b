"""docs/architecture.md stays true: it lists every room with its own sentence, and names functions that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT, SOURCES

PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("fractional_gpu", "fractional_gpu_kernel", "fractional_gpu_hub")


def rooms() -> Iterator[Path]:
    for source, package in zip(SOURCES, PACKAGES, strict=True):
        yield from sorted(path.parent for path in (source / package).rglob("__init__.py"))


def sentence(room: Path) -> str:
    """The first paragraph of the room's docstring."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def table() -> str:
    lines = ["| room | what lives there |", "|---|---|"]
    lines += [f"| `{shown(room)}/` | {sentence(room)} |" for room in rooms()]
    return "\n".join(lines)


def shown(room: Path) -> Path:
    """The room's name on the page: short for those of the first package, which are most."""
    source = next(source for source in SOURCES if room.is_relative_to(source))
    first = SOURCES[0] / PACKAGES[0]
    return room.relative_to(first if room.is_relative_to(first) and room != first else source)


def named() -> list[str]:
    """The functions that the three ways name."""
    text = PAGE.read_text(encoding="utf-8")
    ways = text[text.index("## Three ways") : text.index("## Where do I change")]
    return sorted(set(re.findall(r"`((?:" + "|".join(PACKAGES) + r")\.[\w.]+)`", ways)))


def defines(tree: ast.AST, names: list[str]) -> bool:
    """Whether there is such a definition, at the module's top or in classes."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if not names:
        return True
    return any(
        isinstance(node, kinds) and node.name == names[0] and defines(node, names[1:])
        for node in ast.iter_child_nodes(tree)
    )


def test_every_room_is_listed_with_its_own_sentence() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index("<!-- rooms -->") + 15 : text.index("<!-- /rooms -->")].strip() == table(), (
        "docs/architecture.md: put this table there:\n" + table()
    )


@pytest.mark.parametrize("name", named())
def test_a_function_that_a_way_names_exists(name: str) -> None:
    parts = name.split(".")
    source = SOURCES[PACKAGES.index(parts[0])]
    for length in range(len(parts), 0, -1):
        path = source.joinpath(*parts[:length])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            assert defines(ast.parse(file.read_text(encoding="utf-8")), parts[length:]), f"{file} does not define it"
            return
    pytest.fail("there is no such module")


def test_paths_in_the_table_of_changes_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index("## Where do I change") :]
    for path in re.findall(r"`((?:fractional_gpu|kernelext|hub_spawner|tests)/[\w./]*)`", part):
        place = ROOT / ("provisioner/" + path if path.startswith("fractional_gpu/") else path)
        assert place.exists(), path
