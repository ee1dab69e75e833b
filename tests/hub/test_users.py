"""Two users of a real hub share one device of a pool with oversubscription, and their kernels notice no restart.

`tests/run hub` tells the same story with twelve users.
"""

from collections.abc import Iterator

import pytest

from tests.hub.story import SETTINGS, SIMULATE, Story
from tests.support.hub import HubWorld, new_hub
from tests.support.world import new_world

pytestmark = pytest.mark.promise("hub-restarts")


@pytest.fixture
def hub() -> Iterator[HubWorld]:
    with new_world(SIMULATE) as world:
        world.install(750)
        with new_hub(world, SETTINGS) as hub:
            yield hub


@pytest.mark.timeout(600)
def test_users_share_a_device_and_restarts_are_not_noticed(hub: HubWorld) -> None:
    Story(hub, users=2, seed=1).run()
