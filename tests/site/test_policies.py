"""docs/policies.md says in which order tickets are served, and what can happen to one, as the arbiter does."""

import re
from inspect import getdoc

import pytest

from fractional_gpu.core.queue import QueuePass, Turns
from tests.support.paths import ROOT

MOST_WORDS = 2_000
TEXT = (ROOT / "docs" / "policies.md").read_text()


def numbered(text: str) -> list[str]:
    return [
        line.strip().replace("leases", "kernels").replace("Leases", "Kernels")
        for line in re.findall(r"^ *\d\. .*", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("code", [Turns, QueuePass._visit])
def test_the_page_has_what_the_code_says(code: object) -> None:
    cases = numbered(getdoc(code) or "")
    assert len(cases) >= 5
    assert "\n".join(cases) in TEXT


def test_the_page_is_short() -> None:
    assert len(TEXT.split()) <= MOST_WORDS
