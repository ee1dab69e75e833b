"""Two kernels that do not fit together, for tests that leave them alive: starting them takes longer than what most tests do with them."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.stories import fill
from tests.support.world import Notebook, Server, World, new_world

__all__ = ["NO_TURNS", "Pair", "new_pair"]

NO_TURNS = "c.GPUBroker.pools = {'default': {'preempt': 'never'}}\n"
"""Settings with which a busy kernel keeps its device as long as a test wants, instead of its turn of 10 s or 30 swaps."""


class Pair:
    """Two kernels of 3/4 GPU on one device, on a server in a private world.

    Tests share the processes: the server and, if they still run, the broker and the two kernels. Everything else is
    new: the kernels' variables, the connections to them, the notebooks' folder.
    """

    def __init__(self, world: World, server: Server) -> None:
        self.world = world
        self.server = server
        (self.spec,) = world.install(750)
        self._ids: list[str] = []

    def ready(self, more: str = "", *, mib: int = 4) -> tuple[Notebook, Notebook]:
        """Return both with new bytes, of which the first was suspended for the second; `more` is run in the first."""
        running = {kernel["id"] for kernel in self.server.request("GET", "api/kernels")}
        for kernel_id in running - set(self._ids):
            self.server.request("DELETE", f"api/kernels/{kernel_id}")
        self.server.hang_up()
        for path in self.world.notebooks.iterdir():
            path.unlink()
        old = [self.server.connect(kernel_id) for kernel_id in self._ids if kernel_id in running]
        first, second = [*old, *(self.server.start(self.spec) for _ in range(2 - len(old)))]
        self._ids = [first.kernel_id, second.kernel_id]
        first.must("%reset -f\n" + fill(1, mib) + more)
        second.must("%reset -f\n" + fill(2, mib))
        self.world.await_state(first.kernel_id, "suspended")
        return first, second


@contextmanager
def new_pair(config: str = "") -> Iterator[Pair]:
    """A pair that ends with the block; its kernels start when they are used. `config` is the broker's."""
    with new_world() as world, Server(world) as server:
        world.configure(config)
        yield Pair(world, server)
