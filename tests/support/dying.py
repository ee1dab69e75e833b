"""A broker that dies, or cannot write, at a named point of a story, and what must be true afterwards whatever the point."""

import subprocess
import urllib.error
from collections import Counter
from pathlib import Path

from provisioner.host.failpoints import VARIABLE
from tests.support.stories import CHECK, fill
from tests.support.victims import brokers, released, settled, workers
from tests.support.world import Notebook, Server, World, until

__all__ = ["CONFIG", "SIMULATE", "Story", "points_of"]

SIMULATE = "1x128MiB"  # room for one kernel of 3/4
CONFIG = 'c.GPUBroker.pools = {"default": {"retry_refused": "200ms", "unattached_ttl": "5s"}}\n'
MIB = 64


class Story:
    """Two kernels from birth to death on one device: leases, turns, a suspend by hand, a restart, the end. Told as often as needed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.file = world.folder / "failpoint"
        world.environment[VARIABLE] = str(self.file)
        world.configure(CONFIG)
        (self.spec,) = world.install(750)
        world.start_broker()
        self.server = Server(world)

    def close(self) -> None:
        """End the server."""
        self.server.stop()

    @property
    def reached(self) -> Path:
        """Where the points that were reached are listed."""
        return self.file.with_name(f"{self.file.name}.reached")

    def tell(self, point: str = "", time: int = 1, *, action: str = "kill") -> bool:
        """Tell the story while the broker dies at the point, or fails there; return whether it did. Fails if anything is lost."""
        if point:
            self.world.kill_broker()  # so that the times are counted from here
            self.file.write_text(f"{point} {time} {action}\n")
            self._start_broker()
        first = self._born(1)
        second = self._born(2)
        for notebook in (first, second, first):
            assert notebook.must(CHECK).text == "intact\n"
        second.must("%gpu suspend")
        self._survives(second)
        first.restart()
        first.must(fill(3, MIB))
        self._survives(second)
        self._survives(first)
        for notebook in (first, second):
            notebook.shut_down()
        struck = bool(point) and not self.file.exists()
        self.file.unlink(missing_ok=True)
        self.world.start_broker()  # it may have died when nobody needed it any more
        settled(self.world)
        until(lambda: released(self.world) or None, "every lease and every reservation is gone")
        until(
            lambda: len(brokers(self.world)) == 1 and len(workers(self.world)) <= 1,
            "there is one broker, with its worker",
        )
        return struck

    def _start_broker(self) -> None:
        try:
            self.world.start_broker()
        except subprocess.CalledProcessError:  # it died at once
            assert not self.file.exists(), "a broker did not start although nothing was to fail"
            self.world.start_broker()

    def _born(self, seed: int) -> Notebook:
        try:
            notebook = self.server.start(self.spec)
        except urllib.error.HTTPError:  # the broker died under it: once more, with the fault gone, it must succeed
            assert not self.file.exists(), "a kernel did not start although the broker lived"
            notebook = self.server.start(self.spec)
        notebook.must(fill(seed, MIB))
        return notebook

    @staticmethod
    def _survives(notebook: Notebook) -> None:
        assert notebook.must(CHECK).text == "intact\n"


def points_of(story: Story) -> Counter[str]:
    """Tell the story once undisturbed; return the points it reaches, and how often."""
    story.reached.unlink(missing_ok=True)
    story.world.kill_broker()
    story.world.start_broker()
    story.tell()
    return Counter(story.reached.read_text().split("\n")[:-1])
