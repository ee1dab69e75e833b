"""A Slurm site that exists already: its own GRES, Prolog and TaskProlog, includes, `task/affinity`, and commands outside of the usual path.

And Python environments of its users: one with this package, installed, and one without.
"""

import os
import stat
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.paths import ROOT, SOURCES
from tests.support.slurm import Cluster, Node, new_cluster

__all__ = ["PATH", "View", "new_environment", "new_site"]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""systemd's."""

_COMMANDS = ("scontrol", "squeue", "sinfo", "srun", "sbatch", "sacct", "sacctmgr")
_PACKAGES = Path(sysconfig.get_path("purelib"))


def as_site(cluster: Cluster) -> None:
    """Turn the configuration into one that an administrator wrote over the years."""
    folder = cluster.folder
    lines = cluster.conf.read_text().splitlines()
    nodes = [line for line in lines if line.startswith("NodeName=")]
    others = [
        line
        for line in lines
        if not line.startswith(("NodeName=", "GresTypes=", "TaskPlugin=", "PrologFlags=", "ProctrackType="))
    ]
    (folder / "nodes.conf").write_text("# the nodes\n" + "\n".join(f"{line}  # rack 1" for line in nodes))
    place = others.index(next(line for line in others if line.startswith("PartitionName=")))
    ours = [
        "GresTypes=gpu",
        "TaskPlugin=task/affinity,task/cgroup",
        "PrologFlags=Alloc",
        "ProctrackType=proctrack/cgroup",
        f"Prolog={folder}/prolog.d/*",
        f"TaskProlog={folder}/site-taskprolog",
        "include nodes.conf",
    ]
    cluster.conf.write_text("\n".join([*others[:place], *ours, *others[place:]]) + "\n")
    (folder / "gres.conf").write_text(f"# every GPU of the site\nName=gpu Count=1 File={folder}/nvidia0\n")
    (folder / "prolog.d").mkdir(exist_ok=True)
    for name, text in (
        ("prolog.d/10-log", f"echo $SLURM_JOB_ID >>{folder}/prolog.log"),
        ("site-taskprolog", "echo export SITE=yes"),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    if not (folder / "nvidia0").exists():
        os.mknod(folder / "nvidia0", 0o666 | stat.S_IFCHR, os.makedev(195, 0))


class View:
    """A node's own filesystem: an empty /opt, its own /etc (with the site's files as /etc/slurm), /run/jupyter-gpu and /var/lib.

    Slurm's commands are only in /opt/slurm/bin.
    """

    def __init__(self, cluster: Cluster, node: Node) -> None:
        folder = cluster.folder / f"view.{node.name}"
        for name in ("opt/slurm/bin", "etc", "work", "run/jupyter-gpu", "lib"):
            (folder / name).mkdir(parents=True)
        (folder / "empty").touch()
        for name in _COMMANDS:
            (folder / "opt/slurm/bin" / name).write_bytes(Path("/usr/bin", name).read_bytes())
            (folder / "opt/slurm/bin" / name).chmod(0o755)
        mounts = [
            *(f"mount --bind {folder}/empty /usr/bin/{name}" for name in _COMMANDS),
            f"mount --bind {folder}/opt /opt",
            f"mount -t overlay site -o lowerdir=/etc,upperdir={folder}/etc,workdir={folder}/work /etc",
            "mkdir -p /etc/slurm /etc/systemd/system /etc/jupyter",
            f"mount --bind {cluster.folder} /etc/slurm",
            f"mount --bind {folder}/run /run",
            f"mount --bind {node.run} /run/jupyter-gpu",
            f"mount --bind {folder}/lib /var/lib",
            "mount -t tmpfs none /dev/shm",
            "echo ready; exec sleep infinity",
        ]
        script = "; ".join(mounts)
        self.log = folder / "services.log"
        self._holder = subprocess.Popen(["unshare", "-m", "sh", "-ec", script], stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        with self._holder.stdout as out:
            assert out.readline() == "ready\n"
        self.prefix = ["nsenter", "-t", str(self._holder.pid), "-m"]

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of an administrator, whose PATH has Slurm's commands."""
        environment = {"PATH": f"/opt/slurm/bin:{PATH}", "HOME": "/root", "LC_ALL": "C.UTF-8"}
        return subprocess.run(
            [*self.prefix, *words], env=environment, cwd="/", capture_output=True, text=True, check=False, timeout=120
        )

    def start(self, command: str, *more: str, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a service as systemd does, by `more` if given."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*self.prefix, *more, "sh", "-c", f"exec {command}"],
                env={"PATH": PATH, **environment},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@contextmanager
def new_site() -> Iterator[tuple[Cluster, dict[str, View]]]:
    """The site, and the views of its nodes by their names; ended with the block. Takes root."""
    with ExitStack() as stack:
        views = {}

        def prepare(cluster: Cluster) -> None:
            as_site(cluster)
            for node in cluster.nodes:
                views[node.name] = View(cluster, node)
                stack.callback(views[node.name].close)
                cluster.prefixes[node.name] = views[node.name].prefix

        yield (
            stack.enter_context(new_cluster(constrained=True, node_gres="gpu:1", gres={"gpu": ""}, edit=prepare)),
            views,
        )


def new_environment(folder: Path, place: Path, *, ours: bool) -> None:
    """Make a virtual environment like the tests' own, with this checkout's package or without.

    Nothing is downloaded: the packages are links. `place`: where its users see the folder.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for entry in _PACKAGES.iterdir():
        if "fractional" not in entry.name and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    if ours:
        (packages / "checkout.pth").write_text("".join(f"{source}\n" for source in SOURCES))
        info = next(_PACKAGES.glob("jupyter_fractional_gpu-*.dist-info"))
        (packages / info.name).symlink_to(info)
        (packages / "jupyter-fractional-gpu.pth").symlink_to(ROOT / "provisioner" / "jupyter-fractional-gpu.pth")
        for name, words in (("jupyter-gpu", ""), ("jupyter", '[ "$1" = gpu ] && shift; ')):
            script = folder / "bin" / name
            script.write_text(f'#!/bin/sh\n{words}exec {place}/bin/python -P -m fractional_gpu.commands.main "$@"\n')
            script.chmod(0o755)
