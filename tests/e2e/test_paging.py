"""With `page_out_after`, suspended kernels may together hold more than `host_memory`, as far as their state is in swap space."""

import pytest

from tests.support.nvidia_mode import CONFIG, nvidia_mode
from tests.support.swap_space import swap_space
from tests.support.world import Server, until

pytestmark = pytest.mark.promise("paging")

BLOCK_MIB, BLOCKS = 8, 36
HELD_MIB = BLOCK_MIB * BLOCKS  # the broker takes notice of budgets that differ by 256
HOST_MIB = 480


def large(seed: int) -> str:
    """Code that puts `HELD_MIB` of noise on the device."""
    return f"""
import random
from tests.driver_double import device as cuda
block = random.Random({seed}).randbytes({BLOCK_MIB << 20})
buffer = cuda.allocate({HELD_MIB << 20})
places = range(0, {HELD_MIB << 20}, len(block))
for place in places:
    buffer.write(block, place)
"""


CHECK = "assert all(buffer.read(len(block), place) == block for place in places), 'the bytes differ'"


def test_state_in_swap_space_makes_host_memory_free_for_another_kernel_and_returns_whole() -> None:
    with swap_space(2 * HELD_MIB) as there_is_swap, nvidia_mode(driver="580", devices=1) as mode:
        world = mode.world
        world.configure(f"{CONFIG}c.GPUBroker.page_out_after = '1s'\nc.GPUBroker.host_memory = '{HOST_MIB}MiB'\n")
        with Server(world) as server:
            first, second = mode.start(server), mode.start(server)
            first.must(large(1))
            mode.suspend(first)
            second.must(large(2))
            if there_is_swap:
                until(lambda: world.status().host_budget_mib >= HOST_MIB + HELD_MIB, "state is in swap space")
                mode.suspend(second)
                assert world.status().host_saved_mib > HOST_MIB
            second.must(CHECK)
            first.must(CHECK)
