"""The broker as a machine's service: where its files are, the systemd unit, and how to install the package once more."""

import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from fractional_gpu import __version__

PACKAGE: Final = "jupyter-fractional-gpu"
UNIT: Final = Path("/etc/systemd/system/jupyter-gpu.service")
CONFIG: Final = Path("/etc/jupyter/jupyter_gpu_config.py")
STATE: Final = Path("/var/lib/jupyter-gpu")

_UNIT: Final = """\
# The GPU broker of a machine or of a cluster's node: {unit}
# docs/workloads.md#the-broker-as-a-service explains each line.
[Unit]
Description=Shares GPUs among Jupyter kernels
Documentation=https://pypi.org/project/jupyter-fractional-gpu/
After=nvidia-persistenced.service
# Before jobs, pods and servers come: their kernels start no broker.
Before=slurmd.service kubelet.service jupyterhub.service

[Service]
Type=notify
ExecStart={program} broker --service --config {config} --state-dir {state}
RuntimeDirectory=jupyter-gpu
RuntimeDirectoryMode=0755
RuntimeDirectoryPreserve=yes
StateDirectory=jupyter-gpu
StateDirectoryMode=0700
KillMode=process
Restart=on-failure
WatchdogSec=3min
WatchdogSignal=SIGKILL
LimitNOFILE=65536

[Install]
WantedBy=multi-user.target
"""


def unit_text(program: str | Path) -> str:
    """Return the unit of the broker. `program`: the path of `jupyter-gpu`."""
    return _UNIT.format(unit=UNIT, program=program, config=CONFIG, state=STATE)


def requirement(extras: str) -> str:
    """Return pip's requirement for this package from its origin: a file, a repository, or an index."""
    origin = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "{}")
    url, vcs = origin.get("url"), origin.get("vcs_info")
    if vcs:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{PACKAGE}[{extras}]" + (f" @ {url}" if url else f"=={__version__}")
