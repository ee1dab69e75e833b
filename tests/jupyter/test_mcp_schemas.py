"""What agents rely on, the answers' schemas and the errors' codes, loses nothing while its version stays the same."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.jupyter.mcp import TOOLS, schemas

pytestmark = pytest.mark.promise("agents")

GOLDEN = Path(__file__).with_name("golden") / "mcp.json"
TEXTS = ("description", "title")


def test_nothing_is_lost_within_a_version() -> None:
    now = schemas()
    if os.environ.get("JUPYTER_GPU_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    before = json.loads(GOLDEN.read_text())
    assert now["version"] > before["version"] or lost(before, now) == []


def lost(before: Any, now: Any, at: str = "") -> list[str]:  # noqa: ANN401 - JSON
    """Return what agents could read before and cannot now. Of `required`, more is fine in an answer."""
    if isinstance(before, dict) and isinstance(now, dict):
        kept = [name for name in before if name not in TEXTS]
        missing = [f"{at}/{name}" for name in kept if name not in now]
        return missing + [one for name in kept if name in now for one in lost(before[name], now[name], f"{at}/{name}")]
    if isinstance(before, list) and at.endswith("/required"):
        return [f"{at}/{name}" for name in before if name not in now]
    return [] if before == now or at.endswith("/default") else [at]


def test_a_lost_field_a_changed_type_and_a_lost_code_are_found() -> None:
    before = {"tools": {"a": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}, "errors": {"gone": {}}}
    assert lost(before, before) == []
    now = {"tools": {"a": {"properties": {"x": {"type": "string"}, "y": {}}, "required": ["y"]}}, "errors": {}}
    assert lost(before, now) == ["/tools/a/properties/x/type", "/tools/a/required/x", "/errors/gone"]


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_says_in_its_first_line_what_it_does(name: str) -> None:
    text = (TOOLS[name][0].__doc__ or "").splitlines()[0]
    assert text.endswith(".")
