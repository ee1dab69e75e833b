"""Hubs for end-to-end tests; when one fails, its hub's logs are printed with the failure."""

from collections.abc import Generator

import pytest

from tests.support.hub import HubWorld


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for value in getattr(item, "funcargs", {}).values():
        if report.failed and isinstance(value, HubWorld) and value.world.folder.exists():
            report.sections.extend((f"{name} of the test's hub", text) for name, text in value.logs().items())
    return report
