"""Worlds for end-to-end tests; when a test fails, its world's logs are printed with the failure."""

from collections.abc import Generator, Iterator

import pytest

from tests.support.shared_server import SharedServer
from tests.support.world import Server, World, new_world

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    world = getattr(item, "funcargs", {}).get("world")
    if report.failed and isinstance(world, World) and world.folder.exists():
        report.sections.extend((f"{name} of the test's world", text) for name, text in world.logs().items())
    return report


@pytest.fixture(scope="session")
def shared_server() -> Iterator[SharedServer]:
    shared = SharedServer()
    yield shared
    shared.close()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if "shared_server" not in request.fixturenames:  # the test asks for no server, or its file has another one
        with new_world() as made:
            yield made
        return
    shared = request.getfixturevalue("shared_server")
    with shared.borrowed() as lent:
        yield lent
        if request.node.stash.get(_FAILED, False):
            shared.close()


@pytest.fixture
def server(world: World, shared_server: SharedServer) -> Iterator[Server]:
    """The server that most tests share, or one of the test's own where its world is of its own."""
    shared = shared_server.server_of(world)
    if shared is not None:
        yield shared
        return
    with Server(world) as started:
        yield started
