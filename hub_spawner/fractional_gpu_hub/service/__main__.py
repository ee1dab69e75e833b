"""Starts the service. The port is bound before the service's libraries are imported, because the hub does not wait long for it."""

import argparse
import os
import sys

from fractional_gpu.client.discovery import socket_path
from fractional_gpu_hub.service.broker_follower import StartupPlaceholder
from fractional_gpu_hub.service.configuration import CLUSTERS

_NEEDED = ("JUPYTERHUB_SERVICE_PREFIX", "JUPYTERHUB_SERVICE_URL", "JUPYTERHUB_API_TOKEN")


def main(argv: list[str] | None = None) -> int:
    hub = os.getppid()
    parser = argparse.ArgumentParser(
        prog="python -m fractional_gpu_hub.service",
        description="The hub's page about its GPUs. JupyterHub starts it: see fractional_gpu_hub.service.add_page.",
    )
    parser.add_argument("--socket", help="the GPU broker's socket (default: where `jupyter gpu` finds it)")
    parser.add_argument("--cluster", choices=CLUSTERS, help="show this engine's nodes instead of one broker's devices")
    options = parser.parse_args(argv)
    if missing := [name for name in _NEEDED if not os.environ.get(name)]:
        sys.stderr.write(
            f"fractional_gpu_hub.service: {', '.join(missing)} is not set, because JupyterHub did not start this service; add it to "
            "jupyterhub_config.py with fractional_gpu_hub.service.add_page(c)\n"
        )
        return 2
    url = os.environ["JUPYTERHUB_SERVICE_URL"]
    try:
        placeholder = StartupPlaceholder(url)
    except OSError as error:
        sys.stderr.write(f"fractional_gpu_hub.service: cannot serve on {url}: {error}; give add_page another port\n")
        return 1
    from fractional_gpu_hub.service.app import serve  # noqa: PLC0415 - takes seconds on a busy machine

    serve(options.socket or socket_path(), placeholder.hand_over(), hub=hub, cluster=options.cluster or "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
