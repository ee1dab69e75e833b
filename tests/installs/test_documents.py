"""Each install command of the documents is run by `tests/run installs`, or listed with the reason why not."""

import re
from pathlib import Path

import pytest

from tests.installs import documents
from tests.installs.story import Failure

PAGES = documents.pages_that_install()


@pytest.mark.parametrize("page", PAGES)
def test_each_install_command_of_a_page_is_known(page: str) -> None:
    for command in PAGES[page]:
        documents.why_not(command)


def test_no_reason_is_left_of_a_command_that_is_gone() -> None:
    named = [command for its in PAGES.values() for command in its]
    assert [one for one in documents.CANNOT if not any(re.match(one, command) for command in named)] == []


@pytest.mark.parametrize(
    "text",
    [
        "```bash\npipx install jupyter-fractional-gpu\n```\n",
        "```bash\npip install torch && apt-get -y install jq\n```\n",
        "Run `mamba install jupyterlab` before.\n",
    ],
)
def test_a_command_that_is_not_known_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    (command,) = documents.install_commands(tmp_path / "page.md")
    with pytest.raises(Failure, match="say in tests/installs/documents"):
        documents.why_not(command)


def test_a_program_that_is_only_named_is_no_command(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("Use `pip install --upgrade` or `pip install`, and `conda run` as a wrapper.\n")
    assert list(documents.install_commands(tmp_path / "page.md")) == []
