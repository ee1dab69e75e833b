"""The service as a process of the hub's.

The hub says by the environment where to serve and how to ask it who somebody is. The process ends with SIGTERM, and by itself when the hub
that started it is gone: the next hub starts its own. That one waits a little for the port, which the older may still hold.
"""

import argparse
import asyncio
import errno
import logging
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import jinja2
from jupyterhub.services.auth import HubOAuth
from tornado import web
from tornado.httpserver import HTTPServer
from tornado.log import enable_pretty_logging

from hub_spawner.service.acts import Acts
from hub_spawner.service.handlers import TRUST_S, Missing, routes
from hub_spawner.service.watch import Watch
from provisioner.discovery import socket_path

__all__ = ["main"]

log = logging.getLogger("hub_spawner.service")
_HERE = Path(__file__).parent
_PORT_PATIENCE_S = 30.0
_PAUSE_S = 0.2
_MOST_BODY = 64 * 1024
_BODY_S = 10.0
_IDLE_S = 60.0


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit status; what is missing is said on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m hub_spawner.service",
        description="The hub's page about its GPUs. JupyterHub starts it: see hub_spawner.service.add_page.",
    )
    parser.add_argument("--socket", help="the GPU broker's socket (default: where `jupyter gpu` finds it)")
    options = parser.parse_args(argv)
    missing = [
        name
        for name in ("JUPYTERHUB_SERVICE_PREFIX", "JUPYTERHUB_SERVICE_URL", "JUPYTERHUB_API_TOKEN")
        if not os.environ.get(name)
    ]
    if missing:
        sys.stderr.write(
            f"hub_spawner.service: {', '.join(missing)} is not set: this is started by JupyterHub; add it to jupyterhub_config.py "
            "with hub_spawner.service.add_page(c)\n"
        )
        return 2
    enable_pretty_logging()
    try:
        asyncio.run(_serve(options.socket or socket_path()))
    except OSError as error:
        sys.stderr.write(f"hub_spawner.service: cannot serve on {os.environ['JUPYTERHUB_SERVICE_URL']}: {error}\n")
        return 1
    return 0


async def _serve(socket: str) -> None:
    parent, stop = os.getppid(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    HubOAuth.instance(cache_max_age=TRUST_S)
    watch, acts = Watch(socket), Acts(socket)
    server = HTTPServer(
        _application(watch, acts),
        xheaders=True,
        max_body_size=_MOST_BODY,
        body_timeout=_BODY_S,
        idle_connection_timeout=_IDLE_S,
    )
    await _listen(server, stop)
    watch.start()
    log.info("the page about the GPUs is at %s", os.environ["JUPYTERHUB_SERVICE_PREFIX"])
    try:
        while not stop.is_set() and os.getppid() == parent:
            try:
                await asyncio.wait_for(stop.wait(), 1.0)
            except TimeoutError:
                continue
    finally:
        server.stop()
        acts.close()
        await server.close_all_connections()
        await asyncio.to_thread(watch.stop)


def _application(watch: Watch, acts: Acts) -> web.Application:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    prefix = os.environ["JUPYTERHUB_SERVICE_PREFIX"]
    return web.Application(
        routes(prefix, watch, acts, str(_HERE / "static")),
        cookie_secret=secrets.token_bytes(32),  # a new one each time: whoever is logged in at the hub does not notice
        page=templates.get_template("page.html"),
        default_handler_class=Missing,
        default_handler_args={"watch": watch, "acts": acts, "streams": {}},
        log_function=_log_request,
    )


async def _listen(server: HTTPServer, stop: asyncio.Event) -> None:
    """Listen where the hub says. Raises OSError if somebody else does so for too long."""
    url = urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
    deadline_s = time.monotonic() + _PORT_PATIENCE_S
    while not stop.is_set():
        try:
            server.listen(url.port or 80, url.hostname or "127.0.0.1")
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(_PAUSE_S)
        else:
            return


def _log_request(handler: web.RequestHandler) -> None:
    """One line, without the query: it may hold an XSRF token or a login's code."""
    request = handler.request
    level = logging.DEBUG if handler.get_status() < 400 else logging.INFO
    log.log(level, "%s %s -> %d", request.method, request.path[:200], handler.get_status())
