"""Worlds for end-to-end tests; when a test fails, its world's logs are printed with the failure."""

from collections.abc import Callable, Generator, Iterator

import pytest

from tests.support.kept import Kept
from tests.support.pair import Pair
from tests.support.shared_server import SharedServer
from tests.support.world import Server, World, new_world


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    given = getattr(item, "funcargs", {})
    world = given["pair"].world if isinstance(given.get("pair"), Pair) else given.get("world")
    if report.failed and isinstance(world, World) and world.folder.exists():
        report.sections.extend((f"{name} of the test's world", text) for name, text in world.logs().items())
    return report


@pytest.fixture(scope="session")
def shared_server() -> Iterator[SharedServer]:
    shared = SharedServer()
    yield shared
    shared.close()


@pytest.fixture
def world(request: pytest.FixtureRequest, has_failed: Callable[[], bool]) -> Iterator[World]:
    if "shared_server" not in request.fixturenames:  # the test needs no server, or its file has a separate one
        with new_world() as made:
            yield made
        return
    shared = request.getfixturevalue("shared_server")
    with shared.borrowed() as lent:
        yield lent
        if has_failed():
            shared.close()


@pytest.fixture
def server(world: World, shared_server: SharedServer) -> Iterator[Server]:
    """The server that most tests share, or a separate one if the test has a separate world. Its kernels end with the test."""
    shared = shared_server.server_of(world)
    if shared is not None:
        yield shared
        if shared.reusable:
            shared.clear()
        return
    with Server(world) as started:
        yield started


@pytest.fixture
def pair(kept_pair: Kept[Pair], has_failed: Callable[[], bool]) -> Iterator[Pair]:
    """The two kernels of a file that has a `kept_pair`."""
    with kept_pair.taken(has_failed) as lent:
        yield lent
