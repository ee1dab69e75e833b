"""Users of a real hub notice no restart; and every seat is right after the hub was killed or lost its database, or servers were killed.

`tests/run hub` tells the story of the restarts with twelve users.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from fractional_gpu.protocol.status import LeaseStatus, SeatStatus
from tests.hub.story import KERNEL, SETTINGS, SIMULATE, Story
from tests.support.hub import HubWorld, new_hub
from tests.support.managed import must, ready
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, new_world, until

POOL = {**SETTINGS["pools"]["default"], "when_full": "refuse", "user_limits": {"fraction": "3/4"}}
OUTLIVES_ITS_SERVER = """
import os
from ipykernel.connect import get_connection_file
server = os.getppid()
os.getppid = lambda: server  # what ipykernel watches its parent by
print(server, os.getpid(), get_connection_file())
"""


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with new_world(SIMULATE) as world:
        world.install(750)
        with new_hub(world, {"pools": {"default": POOL}}) as hub:
            yield Story(hub, users=2, seed=1)


def seats(hub: HubWorld) -> list[SeatStatus]:
    with hub.seats() as client:
        return client.seats().seats


def owners(hub: HubWorld) -> list[str]:
    return sorted(seat.owner for seat in seats(hub))


@dataclass
class Outliving:
    server: int
    pid: int
    connection_file: str

    @classmethod
    def of(cls, notebook: Notebook) -> "Outliving":
        server, pid, file = notebook.must(OUTLIVES_ITS_SERVER).text.split()
        return cls(int(server), int(pid), file)

    @contextmanager
    def client(self) -> Iterator[BlockingKernelClient]:
        client = BlockingKernelClient(connection_file=self.connection_file)
        client.load_connection_file()
        with ready(client):
            yield client


@pytest.mark.promise("hub-restarts")
@pytest.mark.timeout(600)
def test_users_share_a_device_and_restarts_are_not_noticed(story: Story) -> None:
    story.run()


@pytest.mark.promise("live-seat", "seat-ends")
def test_a_kernel_that_outlives_its_servers_has_what_their_seats_give_and_no_seat_outlives_its_server(
    story: Story,
) -> None:
    """Continues the story above. The server is killed in the middle of a cell, the broker, then the hub with its database.

    The next hub adopts its servers.
    """
    hub, world, server = story.hub, story.hub.world, story.readers[0].server
    hub.stop(story.readers[1].name)
    story.readers[0].notebook.shut_down()
    notebook = server.start(KERNEL)
    notebook.must(fill(1))
    kernel = Outliving.of(notebook)
    runs = world.folder / "runs"
    notebook.send(
        f"import time\nopen({str(runs)!r}, 'w').close()\nwhile True:\n    buffer.read()\n    time.sleep(0.05)"
    )
    until(runs.exists, "the cell runs")
    server.hang_up()
    world.end(kernel.server, signal.SIGKILL)

    until(lambda: seats(hub) == [], "the hub notices, and gives the seat back")
    until(lambda: lease_of(hub, notebook).state == "suspended", "it is suspended in the middle of its cell")
    assert lease_of(hub, notebook).lease.revoked

    world.kill_broker()
    until(lambda: world.broker_pid() is not None, "another broker serves")
    assert lease_of(hub, notebook).lease.revoked, "the next broker knows"

    hub.server("user0", pool="default", fraction="3/4")
    (seat,) = seats(hub)
    assert (seat.kernels, seat.used_milli) == (1, 750)
    assert lease_of(hub, notebook).spec.seat == seat.seat_id
    until(lambda: lease_of(hub, notebook).state == "resident", "the cell goes on")
    os.kill(kernel.pid, signal.SIGINT)

    hub.stop_hub(signal.SIGKILL)
    (world.folder / "hub.sqlite").unlink()
    hub.start_hub(cleanup=True)
    until(lambda: seats(hub) == [], "no server of this hub has the seat")
    assert lease_of(hub, notebook).lease.revoked

    server = hub.server("user0", pool="default", fraction="3/4")
    assert not lease_of(hub, notebook).lease.revoked
    with kernel.client() as client:
        assert must(client, CHECK) == "intact\n"
    world.end(kernel.pid, signal.SIGKILL)
    until(lambda: world.status().leases == [], "its lease has ended")

    world.kill_broker()  # the first hub's, which outlived it
    before = until(world.broker_pid, "this hub's broker serves")
    hub.server("user1", pool="default", fraction="3/4")
    server.start(KERNEL).must(fill(1))
    assert owners(hub) == ["user0", "user1"]
    hub.stop_hub()
    world.start_broker()
    assert world.broker_pid() not in {None, before}
    assert owners(hub) == [], "they were given back before the broker ended"
    until(lambda: world.status().leases == [], "the lease of the kernel has ended, too")


def lease_of(hub: HubWorld, notebook: Notebook) -> LeaseStatus:
    return hub.world.lease(notebook.kernel_id)
