"""Two users of a hub whose servers are Slurm jobs on one node, each with three quarters of its only device: they take turns.

Also a command: `python -m tests.engines.hub_story --turns 10`, as root.
"""

import argparse
import os
import pwd
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.hub import HubServer, HubWorld, new_hub
from tests.support.paths import PYTHONPATH, ROOT
from tests.support.slurm import Cluster, new_cluster
from tests.support.slurm_nodes import GPUNode, gpu_nodes, install_scripts
from tests.support.world import Notebook, new_world, until

__all__ = ["USERS", "Story", "new_story", "story_cluster"]

USERS = ("games", "backup")  # users of every Debian machine, with separate uids
DEVICE_MIB = 512
KERNEL = "fractional-gpu-default-750"
_NODE = """
c.GPUBroker.pools = {"default": {
    "fractions": ["1/4", "3/4"], "oversubscription": 4, "wait_bound": "100%", "idle_after": "on-demand", "min_residency": "200ms",
}}
"""
_HUB = """
import os, pwd
from traitlets import default
from fractional_gpu_hub.engines.slurm import FractionalGPUSlurmSpawner

class Spawner(FractionalGPUSlurmSpawner):
    @default("req_homedir")
    def _homes(self):
        return given["homes"] + "/" + self.user.name

    def user_env(self, environment):
        return {**super().user_env(environment), "HOME": self.req_homedir}

c.JupyterHub.spawner_class = Spawner
c.BatchSpawnerBase.exec_prefix = "setpriv --reuid {username} --regid {username} --init-groups --"  # keeps HOME, which runuser sets
c.BatchSpawnerBase.req_options = "--nodelist=n2 --cpus-per-task=1"
c.BatchSpawnerBase.batchspawner_singleuser_cmd = given["wrapper"]
c.EngineGPUMixin.gpu_base_memory = "1100MiB"
c.EngineGPUMixin.gpu_wait = 240
c.FractionalGPUSlurmSpawner.startup_poll_interval = 0.5
c.FractionalGPUSlurmSpawner.gpu_nodes_cache = 0
c.JupyterHub.hub_connect_ip = "127.0.0.1"
"""
_FILL = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import device; "
    "data = device.open().fill(seed={seed}, size={mib} * 2**20); data.step(); print(data.wrong_bytes())"
)
_STEP = "data.step(); print(data.wrong_bytes())"


class Reader:
    """A user whose notebook holds data that must survive."""

    def __init__(self, hub: HubWorld, name: str) -> None:
        self.name = name
        self._hub = hub
        entry = pwd.getpwnam(name)
        home = hub.homes / name
        home.mkdir(mode=0o700)
        os.chown(home, entry.pw_uid, entry.pw_gid)
        self.server: HubServer
        self.notebook: Notebook

    def begin(self, seed: int, mib: int) -> None:
        """Open a notebook on the user's server and put this much data on the device."""
        self._hub.await_server(self.name)
        self.server = self._hub.connect(self.name)
        self.notebook = self.server.start(KERNEL)
        assert self.notebook.must(_FILL.format(seed=seed, mib=mib)).text == "0\n"

    def step(self) -> None:
        """Change all data on the device and compare it: no byte may be wrong."""
        assert self.notebook.must(_STEP).text == "0\n", f"{self.name}: bytes are wrong"


class Story:
    """The hub, Slurm, the broker and agent of node n2, and the users."""

    def __init__(self, hub: HubWorld, cluster: Cluster, node: GPUNode) -> None:
        self.hub = hub
        self.cluster = cluster
        self.node = node
        self.readers = [Reader(hub, name) for name in USERS]

    def begin(self, mib: int) -> None:
        """Start all servers, and put this much data on the device for each user; comparing it takes processor time."""
        for reader in self.readers:
            self.hub.spawn(reader.name, pool="default", fraction="3/4")
        for seed, reader in enumerate(self.readers, 1):
            reader.begin(seed, mib)

    def turn(self) -> None:
        """Each user computes once."""
        for reader in self.readers:
            reader.step()

    def restart_hub(self) -> None:
        """Kill the hub; the next one knows the servers, and their jobs have continued."""
        before = sorted(job["JobId"] for job in self.jobs())
        self.hub.stop_hub(signal.SIGKILL)
        self.hub.start_hub()
        until(lambda: len(self._ready()) == len(self.readers), "the hub has found its servers")
        assert sorted(job["JobId"] for job in self.jobs()) == before

    def _ready(self) -> list[str]:
        return [user["name"] for user in self.hub.api("GET", "users") if (user["servers"].get("") or {}).get("ready")]

    def jobs(self) -> list[dict[str, str]]:
        """Return the jobs that have not ended."""
        return [self.cluster.job(job_id) for job_id in self.cluster.call("squeue", "-h", "-o", "%A").split()]

    def check(self) -> None:
        """Check that the kernels really took turns, each with a seat of its job."""
        leases = self.node.status().leases
        assert {lease.spec.owner for lease in leases} == set(USERS)
        assert all(lease.suspends for lease in leases), "each of them made room for the other"
        with self.node.client() as client:
            seats = client.seats().seats
        assert {seat.workload.id for seat in seats if seat.workload} == {job["JobId"] for job in self.jobs()}

    def logs(self) -> dict[str, str]:
        """Return the end of every log."""
        files = list(self.hub.homes.glob("*/*.log"))
        return {
            **self.hub.logs(), **self.cluster.logs(),
            **{name: self.node.log(name)[-5000:] for name in ("agent.out", "broker.out")},
            **{str(file): file.read_text(errors="replace")[-5000:] for file in files},
        }  # fmt: skip


@contextmanager
def story_cluster() -> Iterator[Cluster]:
    """A Slurm whose jobs have control groups. Needs root."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with new_cluster(constrained=True, scripts=lambda nodes: install_scripts(nodes, environment)) as cluster:
        yield cluster


@contextmanager
def new_story(cluster: Cluster, **more: Any) -> Iterator[Story]:  # noqa: ANN401 - for the hub
    """The hub and the node, ended with the block."""
    scripts = Path(sys.executable).parent
    with ExitStack() as stack:
        world = stack.enter_context(new_world(f"1x{DEVICE_MIB}MiB"))
        world.install(250, 750)
        (node,) = stack.enter_context(
            gpu_nodes(cluster, simulate=world.simulate, config=_NODE, service=True, only=["n2"])
        )
        for folder in (world.folder, world.folder / "data", *(world.folder / "data").rglob("*")):
            folder.chmod(0o755 if folder.is_dir() else 0o644)
        world.environment["SLURM_CONF"] = str(cluster.conf)
        world.environment["PATH"] = cluster.environment["PATH"]
        until(lambda: "Extra={" in cluster.call("scontrol", "show", "node", "-o", "n2"), "the agent has published")
        hub = stack.enter_context(
            new_hub(
                world, before=_HUB, wrapper=str(scripts / "batchspawner-singleuser"), command=[str(scripts / "jupyterhub-singleuser")],
                environment={"PYTHONPATH": PYTHONPATH, "JUPYTER_PATH": str(world.folder / "data")}, cleanup=False, **more,
            )
        )  # fmt: skip
        hub.homes.chmod(0o755)
        story = Story(hub, cluster, node)
        try:
            yield story
        except BaseException as error:
            for name, text in story.logs().items():
                error.add_note(f"--- {name}\n{text}")
            raise
        finally:  # a broker that still has leases leaves its simulated host behind
            cluster.cancel(*cluster.call("squeue", "-h", "-o", "%A").split())
            until(lambda: not node.status().leases, "no lease is left")


def main() -> int:
    """Run the story with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--mib", type=int, default=64, help="each user's data on the device")
    options = parser.parse_args()
    begun_s = time.monotonic()
    with story_cluster() as cluster, new_story(cluster) as story:
        story.begin(options.mib)
        sys.stdout.write(
            f"{time.monotonic() - begun_s:6.1f} s  both have {options.mib} MiB on a device of {DEVICE_MIB} MiB\n"
        )
        for turn in range(options.turns):
            story.turn()
            sys.stdout.write(f"{time.monotonic() - begun_s:6.1f} s  turn {turn + 1}: 0 wrong bytes\n")
            sys.stdout.flush()
        story.restart_hub()
        story.turn()
        sys.stdout.write(f"{time.monotonic() - begun_s:6.1f} s  the hub was killed and is back: 0 wrong bytes\n")
        story.check()
        suspends = sum(lease.suspends for lease in story.node.status().leases)
        sys.stdout.write(f"{time.monotonic() - begun_s:6.1f} s  {suspends} suspends\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
