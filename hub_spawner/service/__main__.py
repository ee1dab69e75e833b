"""The entry of the service's process: it takes its place first, and its libraries then."""

import argparse
import os
import sys

from hub_spawner.service.doorman import Doorman
from provisioner.discovery import socket_path

__all__ = ["main"]

_NEEDED = ("JUPYTERHUB_SERVICE_PREFIX", "JUPYTERHUB_SERVICE_URL", "JUPYTERHUB_API_TOKEN")


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit status; what is missing is said on stderr."""
    hub = os.getppid()
    parser = argparse.ArgumentParser(
        prog="python -m hub_spawner.service",
        description="The hub's page about its GPUs. JupyterHub starts it: see hub_spawner.service.add_page.",
    )
    parser.add_argument("--socket", help="the GPU broker's socket (default: where `jupyter gpu` finds it)")
    options = parser.parse_args(argv)
    if missing := [name for name in _NEEDED if not os.environ.get(name)]:
        sys.stderr.write(
            f"hub_spawner.service: {', '.join(missing)} is not set: this is started by JupyterHub; add it to jupyterhub_config.py "
            "with hub_spawner.service.add_page(c)\n"
        )
        return 2
    url = os.environ["JUPYTERHUB_SERVICE_URL"]
    try:
        doorman = Doorman(url)
    except OSError as error:
        sys.stderr.write(f"hub_spawner.service: cannot serve on {url}: {error}; give add_page another port\n")
        return 1
    from hub_spawner.service.app import serve  # noqa: PLC0415 - takes seconds on a busy machine

    serve(options.socket or socket_path(), doorman.hand_over(), hub=hub)
    return 0


if __name__ == "__main__":
    sys.exit(main())
