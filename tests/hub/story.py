"""Users of a hub share one device, each with the example notebook, while hub, proxy and broker restart.

Also a command: `python -m tests.hub.story --users 12 --seed 1`.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable

from tests.support.hub import HubServer, HubWorld, new_hub
from tests.support.paths import ROOT
from tests.support.world import Notebook, new_world, until

__all__ = ["KERNEL", "SETTINGS", "SIMULATE", "Story"]

EXAMPLES = ROOT / "examples"
SETTINGS = {"pools": {"default": {"oversubscription": 12, "wait_bound": "100%", "idle_after": "on-demand"}}}
DEVICE_MIB = 112
SIMULATE = f"1x{DEVICE_MIB}MiB"
KERNEL = "fractional-gpu-default-750"
PID = "import os; print(os.getpid())"


class Reader:
    def __init__(self, hub: HubWorld, name: str) -> None:
        self.name = name
        self._hub = hub
        home = hub.homes / name
        home.mkdir(exist_ok=True)
        shutil.copy(EXAMPLES / "device.py", home)
        cells = json.loads((EXAMPLES / "tenant-a.ipynb").read_text())["cells"]
        self.cells = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        self.done = 0
        self.server: HubServer
        self.notebook: Notebook
        self.pid = ""

    def ask(self) -> None:
        self._hub.spawn(self.name, pool="default", fraction="3/4")

    def open(self) -> None:
        self._hub.await_server(self.name)
        self.server = self._hub.connect(self.name)
        self.notebook = self.server.start(KERNEL)
        self.pid = self.notebook.must(PID).text

    def send(self) -> str:
        return self.notebook.send(self.cells[self.done])

    def finish(self, msg_id: str) -> None:
        reply = self.notebook.wait(msg_id)
        assert reply.status == "ok", f"{self.name}, cell {self.done}: {reply.error}\n{reply.text}"
        self.done += 1
        if self.done == len(self.cells):
            result = next(data["application/json"] for data in reply.data if "application/json" in data)
            assert result["intact"], f"{self.name}: {result}"
            assert result["wrong_bytes"] == 0
            assert result["simulated"]

    def reconnect(self) -> None:
        self.notebook = self.server.reconnect(self.notebook)
        assert self.notebook.must(f"%%cpu\n{PID}").text == self.pid


class Story:
    def __init__(self, hub: HubWorld, users: int, seed: int, say: Callable[[str], object] = lambda _: None) -> None:
        self.hub = hub
        self.say = say
        self.random = random.Random(seed)
        self.readers = [Reader(hub, f"user{number}") for number in range(users)]

    def run(self) -> None:
        """Run to the end; fails at the first broken promise."""
        for reader in self.readers:
            reader.ask()
        for reader in self.readers:
            reader.open()
        self.say("every server runs")
        for _ in range(2):
            self._in_turn()
        self.say("every user has filled their share, one after the other")
        self._restart_hub()
        self._at_random(len(self.readers))
        self._restart_broker()
        self._at_random(len(self.readers))
        self._restart_proxy()
        while not all(reader.done == len(reader.cells) for reader in self.readers):
            self._at_random(1)
        self._check()

    def _in_turn(self) -> None:
        for reader in self.readers:
            reader.finish(reader.send())

    def _at_random(self, cells: int) -> None:
        """Run this many cells, of up to four users at the same time."""
        while cells > 0:
            ready = [reader for reader in self.readers if reader.done < len(reader.cells)]
            some = self.random.sample(ready, min(len(ready), self.random.randint(1, 4)))
            if not some:
                return
            sent = [(reader, reader.send()) for reader in some]
            for reader, msg_id in sent:
                reader.finish(msg_id)
            cells -= len(some)

    def _restart_hub(self) -> None:
        seats = self._seats()
        self.hub.stop_hub()
        self.say("the hub has ended, and its broker with it")
        self._at_random(2)  # a client that needs a broker starts it
        self.hub.start_hub()
        until(lambda: len(self._ready()) == len(self.readers), "the hub has found its servers")
        assert self._seats() == seats
        self.say("the hub is back, and knows its servers and their seats")

    def _restart_broker(self) -> None:
        before = self.hub.world.broker_pid()
        assert before is not None
        self.hub.world.end(before, signal.SIGKILL)
        self._at_random(2)
        until(lambda: self.hub.world.broker_pid() not in {None, before}, "another broker serves")
        self.say("the broker was killed, and another one serves")

    def _restart_proxy(self) -> None:
        self.hub.stop_proxy()
        self.hub.start_proxy()
        for reader in self.readers:
            until(lambda reader=reader: self._has_route(reader), f"the proxy knows {reader.name} again")  # type: ignore[misc]
            reader.reconnect()
        self.say("the proxy was restarted, and every notebook is back on its kernel")

    def _has_route(self, reader: Reader) -> bool:
        try:
            reader.server.request("GET", "api")
        except OSError:
            return False
        return True

    def _ready(self) -> list[str]:
        return [user["name"] for user in self.hub.api("GET", "users") if (user["servers"].get("") or {}).get("ready")]

    def _seats(self) -> list[str]:
        with self.hub.seats() as client:
            return sorted(seat.seat_id for seat in client.seats().seats)

    def _check(self) -> None:
        for reader in self.readers:
            assert reader.notebook.must(f"%%cpu\n{PID}").text == reader.pid, (
                "it is the kernel that was there in the beginning"
            )
        leases = self.hub.world.status().leases
        assert len(leases) == len(self.readers)
        assert {lease.spec.owner for lease in leases} == {reader.name for reader in self.readers}
        assert sum(lease.spec.reserve_mib for lease in leases) > DEVICE_MIB, "all together have more than the device"
        assert not [lease for lease in leases if lease.state == "quarantined"]
        log = self.hub.logs()["hub.err"] + self.hub.world.logs().get("broker.log", "")
        assert "no seat for" not in log
        assert "got no kernel" not in log
        self.say(f"all data intact; {sum(lease.suspends for lease in leases)} suspends")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begun = time.monotonic()

    def say(sentence: str) -> None:
        sys.stdout.write(f"{time.monotonic() - begun:7.1f} s  {sentence}\n")
        sys.stdout.flush()

    with new_world(SIMULATE) as world:
        world.install(750)
        with new_hub(world, SETTINGS) as hub:
            try:
                Story(hub, options.users, options.seed, say).run()
            except BaseException:
                for name, text in hub.logs().items():
                    sys.stderr.write(f"--- {name}\n{text}\n")
                raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
