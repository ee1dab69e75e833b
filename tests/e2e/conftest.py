"""Worlds for end-to-end tests; when a test fails, its world's logs are printed with the failure."""

from collections.abc import Generator, Iterator

import pytest

from tests.support.world import Server, World, new_world


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    world = getattr(item, "funcargs", {}).get("world")
    if report.failed and isinstance(world, World) and world.folder.exists():
        report.sections.extend((f"{name} of the test's world", text) for name, text in world.logs().items())
    return report


@pytest.fixture
def world() -> Iterator[World]:
    with new_world() as made:
        yield made


@pytest.fixture
def server(world: World) -> Iterator[Server]:
    with Server(world) as started:
        yield started
