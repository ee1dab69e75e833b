"""Users of a real hub share one device of a pool with oversubscription, and nothing that restarts is noticed by a kernel.

`tests/run hub` tells the same story of twelve users.
"""

import pytest

from tests.hub.story import SETTINGS, SIMULATE, Story
from tests.support.hub import new_hub
from tests.support.world import new_world


@pytest.mark.timeout(600)
def test_users_share_a_device_and_restarts_are_not_noticed() -> None:
    with new_world(SIMULATE) as world:
        world.install(500)
        with new_hub(world, SETTINGS) as hub:
            Story(hub, users=4, seed=1).run()
