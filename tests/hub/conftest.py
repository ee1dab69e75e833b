"""Hubs for end-to-end tests; when one fails, its hub's logs are printed with the failure."""

import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.hub import HubWorld


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for value in getattr(item, "funcargs", {}).values():
        if report.failed and isinstance(value, HubWorld) and value.world.folder.exists():
            report.sections.extend((f"{name} of the test's hub", text) for name, text in value.logs().items())
    return report


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users may enter, with a short path."""
    made = Path(tempfile.mkdtemp(prefix="jfg-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)
