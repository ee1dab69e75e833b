"""The brokers and agents of a test's Slurm nodes, and the scripts that `jupyter gpu node install` writes for them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.commands.node.install import WRAPPER
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.status import HostStatus
from tests.support.paths import PYTHONPATH
from tests.support.slurm import GRES, Cluster, Node
from tests.support.world import World, until

__all__ = ["SHARE", "GPUNode", "gpu_nodes", "install_scripts"]

SHARE = f"--gres={GRES}:open:250"
_CONFIG = """
c.GPUBroker.pools = {"default": {"fractions": ["1/8", "1/4", "1/2", "1"], "oversubscription": 4, "wait_bound": "60%"}}
"""
_MAIN = [sys.executable, "-P", "-m", "fractional_gpu.commands.main"]


class GPUNode:
    def __init__(
        self, cluster: Cluster, node: Node, *, simulate: str, words: Sequence[str], config: str, service: bool = False
    ) -> None:
        self.cluster = cluster
        self.node = node
        self.simulate = simulate
        self.words = list(words)
        self.service = service
        self.broker: subprocess.Popen[bytes] | None = None
        self.agent: subprocess.Popen[bytes] | None = None
        (node.run / "config.py").write_text(config)
        others = ("JUPYTER", "SLURM_", "KUBERNETES_")  # a service refuses to run in a pod, which the suite may do
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        self.environment = {
            **kept,
            "SLURM_CONF": str(cluster.conf),
            "PYTHONPATH": PYTHONPATH,
            "XDG_STATE_HOME": str(node.run / "state"),
            "JUPYTER_CONFIG_DIR": str(node.run),
        }

    @property
    def main(self) -> list[str]:
        return list(_MAIN)

    @property
    def seats(self) -> Path:
        return self.node.run / "seats"

    def start_broker(self) -> None:
        command = [*_MAIN, "broker", "--socket", self.node.socket, "--simulate", self.simulate, "--idle-exit", "never"]
        command += ["--config", str(self.node.run / "config.py"), "--state-dir", str(self.node.run / "ledger")]
        command += ["--service"] if self.service else []
        self.broker = self._start(command, "broker.out")
        until(self._answers, f"the broker of {self.node.name} serves")

    def _answers(self) -> bool:
        assert self.broker is not None
        assert self.broker.poll() is None, (self.node.run / "broker.out").read_text()
        with suppress(FractionalGPUError):
            self.status()
            return True
        return False

    def start_agent(self, *more: str) -> None:
        words = ["--every", "1s", "--floor", "200ms", "--jitter", "0", "--look", "3s", "--comment-every", "2s"]
        command = [*_MAIN, "node", "agent", "--engine", "slurm", "--node", self.node.name, *words, *self.words, *more]
        self.agent = self._start(command, "agent.out")

    def _start(self, command: Sequence[str], log: str) -> "subprocess.Popen[bytes]":
        with (self.node.run / log).open("ab") as out:
            return subprocess.Popen(
                command,
                env=self.environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def stop_agent(self) -> int:
        assert self.agent is not None
        self.agent.terminate()
        code = self.agent.wait(60)
        self.agent = None
        return code

    def stop_broker(self, number: int = signal.SIGTERM) -> None:
        assert self.broker is not None
        self.broker.send_signal(number)
        self.broker.wait(60)
        self.broker = None

    @contextmanager
    def client(self) -> Iterator[SeatClient]:
        with SeatClient(self.node.socket) as client:
            yield client

    def status(self) -> HostStatus:
        with self.client() as client:
            return client.status()

    def lease_states(self) -> list[str]:
        return sorted(lease.state for lease in self.status().leases)

    def log(self, name: str = "agent.out") -> str:
        return (self.node.run / name).read_text(errors="replace")

    def close(self) -> None:
        if self.agent is not None:
            self.stop_agent()
        if self.broker is not None:
            if self.broker.poll() is None:
                self.broker.send_signal(signal.SIGCONT)
            self.stop_broker()
        for pid in self._left():
            World.end(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Return processes that name this node's folder: a worker of a broker that was killed."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if os.fsencode(f"{self.node.run}/") in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found


def options_of(node: Node, *more: str) -> list[str]:
    return ["--socket", node.socket, "--seats", str(node.run / "seats"), *more]


def install_scripts(nodes: Sequence[Node], environment: Mapping[str, str], *more: str) -> dict[str, str]:
    """Write each node's scripts by `jupyter gpu node install`; return what slurm.conf names: scripts that choose the node's own."""
    folder = nodes[0].run.parent / "scripts"
    for node in nodes:
        command = [*_MAIN, "node", "install", "--folder", str(folder / node.name), "--node", node.name]
        subprocess.run(
            [*command, *options_of(node, *more)], env=dict(environment), check=True, stdout=subprocess.DEVNULL
        )
    # slurmd gives its scripts a clean environment: an installed package needs none, a checkout does.
    script = nodes[0].run.parent / WRAPPER
    script.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{PYTHONPATH}"\n'
        "case $SLURM_SCRIPT_CONTEXT in prolog_slurmd) name=prolog ;; epilog_slurmd) name=epilog ;; *) name=taskprolog ;; esac\n"
        f'exec {folder}/"$SLURMD_NODENAME"/$name\n'
    )
    script.chmod(0o755)
    return dict.fromkeys(("Prolog", "Epilog", "TaskProlog"), str(script))


@contextmanager
def gpu_nodes(
    cluster: Cluster,
    *,
    simulate: str = "1x1GiB",
    more: Sequence[str] = (),
    config: str = _CONFIG,
    service: bool = False,
    only: Sequence[str] = ("n1", "n2"),
) -> Iterator[list[GPUNode]]:
    """The brokers and agents of a cluster's nodes, ended with the block. `service`: the brokers serve all users, which takes root."""
    made = [
        GPUNode(cluster, node, simulate=simulate, words=options_of(node, *more), config=config, service=service)
        for node in cluster.nodes
        if node.name in only
    ]
    try:
        for node in made:
            node.start_broker()
        for node in made:
            node.start_agent()
        yield made
    finally:
        for node in made:
            node.close()
