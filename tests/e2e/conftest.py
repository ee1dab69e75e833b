from collections.abc import Iterator

import pytest

from tests.support.world import Server, World, new_world


@pytest.fixture
def world() -> Iterator[World]:
    with new_world() as made:
        yield made


@pytest.fixture
def server(world: World) -> Iterator[Server]:
    with Server(world) as started:
        yield started
