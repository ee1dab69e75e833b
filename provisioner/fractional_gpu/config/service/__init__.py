"""The files installed for a broker that runs as a system service, and how to reinstall the package."""

import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from fractional_gpu import __version__
from fractional_gpu.protocol.names import SYSTEM_UNIT

PACKAGE: Final = "jupyter-fractional-gpu"
UNIT: Final = Path(SYSTEM_UNIT)
CONFIG: Final = Path("/etc/jupyter/jupyter_gpu_config.py")
PROGRAM: Final = Path("/usr/local/bin/jupyter-gpu")
PROFILE: Final = Path("/etc/profile.d/jupyter-gpu.sh")
KERNELS: Final = Path("/usr/local/share/jupyter/kernels")
PARTS: Final = (UNIT, CONFIG, PROGRAM, PROFILE, KERNELS)
STATE: Final = Path("/var/lib/jupyter-gpu")
RECORD: Final = Path("/etc/jupyter-gpu-setup.json")  # written by `jupyter gpu setup-machine`


def service_files(environment: str) -> dict[Path, str]:
    """Return the contents of `UNIT`, `PROGRAM` and `PROFILE`, by path, for the package in this environment."""
    texts = {path: (Path(__file__).parent / path.name).read_text(encoding="utf-8") for path in (UNIT, PROGRAM, PROFILE)}
    return {path: text.replace("/opt/jupyter-gpu", environment) for path, text in texts.items()}


def requirement(extras: str) -> str:
    """Return the `pip install` argument that reinstalls this package from the same file, repository or index."""
    origin = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "{}")
    url, vcs = origin.get("url"), origin.get("vcs_info")
    if vcs:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{PACKAGE}[{extras}]" + (f" @ {url}" if url else f"=={__version__}")
