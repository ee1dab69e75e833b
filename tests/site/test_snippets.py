"""Every fenced block of README and docs has a language, and is run here on simulated GPUs or says why it is not."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from fractional_gpu.commands.main import COMMANDS
from fractional_gpu.config import ConfigError
from fractional_gpu.protocol.errors import FractionalGPUError
from tests.site.blocks import QUIET, REASONS, RUN, Block, blocks, commands, pages
from tests.site.desk import Desk, check_arguments, open_desk, says
from tests.support.paths import ROOT
from tests.support.world import new_world

pytestmark = pytest.mark.promise("documents")

ALL = [block for page in pages() for block in blocks(page)]
LEFT_OUT = [block for block in ALL if block.reason]
RUNNABLE = [block for block in ALL if block.language in RUN and not block.reason]
PRINTED = {before: after for before, after in pairwise(ALL) if after.prints and before.page == after.page}
_TYPED = re.compile(r"\s*(\$ |(sudo |python3? -m |pip |jupyter |tests/run|kubectl |systemctl )\S)")


def wrong(block: Block) -> str:
    """Return what is wrong with how a block is marked, or nothing."""
    if not block.language:
        return "has no language"
    if block.prints and block.language != "text":
        return "is marked as output: its language is text"
    if block.language in QUIET:
        typed = [line for line in block.text.splitlines() if _TYPED.match(line)]
        return f"has a command in a block that is not run: {typed[0]}" if typed and not block.prints else ""
    if block.reason:
        return "" if block.reason.startswith(REASONS) else f"is not run for another reason than {', '.join(REASONS)}"
    return "" if block.language in RUN else f"is in a language that is not run: {block.language}"


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_has_a_language_and_is_run_or_says_why_not(block: Block) -> None:
    assert not wrong(block), f"{block} {wrong(block)}"


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```\njupyter gpu status\n```\n", "has no language"),
        ("```text\njupyter gpu status\n```\n", "has a command in a block that is not run"),
        ("```text\n$ ls\n```\n", "has a command in a block that is not run"),
        ("```yml\na: 1\n```\n", "is in a language that is not run: yml"),
        ("<!-- not run: no time -->\n```bash\nls\n```\n", "is not run for another reason"),
        ("<!-- not run: needs a GPU -->\n\n```console\nls\n```\n", "is in a language that is not run: console"),
        ("<!-- not run: needs a GPU -->\n```console\nls\n```\n", ""),
        ("```bash\nls\n```\n", ""),
    ],
)
def test_a_block_that_is_neither_is_found(page: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(page)
    (block,) = blocks(tmp_path / "page.md")
    assert wrong(block).startswith(complaint)
    assert bool(wrong(block)) == bool(complaint)


def test_a_fence_that_stays_open_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# A\n\n  ```bash\n  ls\n")
    with pytest.raises(ValueError, match=r"page\.md:3: the fence is not closed"):
        list(blocks(tmp_path / "page.md"))


@pytest.mark.parametrize("block", LEFT_OUT, ids=str)
def test_our_commands_that_are_not_run_have_arguments_that_exist(block: Block) -> None:
    if block.reason.startswith("tests/"):
        assert (ROOT / block.reason.split()[0]).exists(), block.reason
    for line in commands(block.text):
        if line.startswith("jupyter gpu"):
            check_arguments(line)


def test_commands_that_sentences_name_exist() -> None:
    named = {
        (page.name, name) for page in pages() for name in re.findall(r"`jupyter[ -]gpu ([a-z]+)", page.read_text())
    }
    assert {pair for pair in named if pair[1] not in COMMANDS} == set()
    assert len(named) > len(COMMANDS)


# -- running ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with new_world("2x1GiB") as world, open_desk(world) as desk:
        yield desk


@pytest.mark.parametrize("page", sorted({block.page for block in RUNNABLE}))
def test_the_blocks_of_a_page_run_one_after_the_other(page: str, desk: Desk) -> None:
    desk.open_page(page)
    for block in RUNNABLE:
        if block.page == page:
            print(f"{block}:")  # noqa: T201 - seen where it fails
            desk.prepare()
            printed = desk.run(block)
            if block in PRINTED:
                assert says(PRINTED[block].text, printed), f"{PRINTED[block]}: the block before it printed\n{printed}"


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "jupyter gpu pin\n"),
        ("bash", "jupyter gpu status --nonsense\n"),
        ("bash", "jupyter gpu status | grep nonsense\n"),
        ("bash", "jupyter gpu audit --nonsense --follow\n"),
        ("bash", "jupyter lab --ServerApp.port=nonsense\n"),
        ("python", "c.GPUBroker.nonsense = 1\n"),
        ("python", "from fractional_gpu_hub import nonsense\n"),
        ("ipython", "%gpu nonsense\n"),
        (
            "json",
            '{"metadata": {"kernel_provisioner": {"provisioner_name": "fractional-gpu-provisioner", "config": {"fraction": 7}}}}',
        ),
        ("toml", '[project.entry-points."fractional_gpu.devices"]\nother = "nonsense"\n'),
        ("yaml", "fractional_gpu:\n  pools:\n    one: {nonsense: 1}\n"),
        ("ini", "[Service]\nExecStart=/opt/jupyter-gpu broker --nonsense-x y --idle-exit\n"),
    ],
)
def test_a_block_that_is_wrong_fails(language: str, text: str, desk: Desk) -> None:
    desk.prepare()
    with pytest.raises((AssertionError, FractionalGPUError, ConfigError, ImportError, SystemExit)):
        desk.run(Block(page="wrong.md", line=1, language=language, text=text))


def test_output_is_compared_loosely() -> None:
    assert says("share  1/4\nmemory 20 MiB ...\n", "x\n  share 1/2\nmemory  7 MiB of 8\n")
    assert not says("share 1/4\n", "memory 1/4\n")
    assert not says("memory\nshare\n", "share\nmemory\n")
