"""The service as a process of the hub's.

The hub says by the environment where to serve and how to ask it who somebody is. The process ends with SIGTERM, and by itself when the hub
that started it is gone: the next hub starts its own.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
from pathlib import Path

import jinja2
from jupyterhub.services.auth import HubOAuth
from tornado import web
from tornado.httpserver import HTTPServer
from tornado.log import enable_pretty_logging

from fractional_gpu_hub.service.actions import Acts
from fractional_gpu_hub.service.handlers import TRUST_S, Missing, routes
from fractional_gpu_hub.service.watch import Watch

__all__ = ["serve"]

log = logging.getLogger("fractional_gpu_hub.service")
_HERE = Path(__file__).parent
_LOOK_S = 0.5  # how often it is looked whether the hub is still there
_MOST_BODY = 64 * 1024
_BODY_S = 10.0
_IDLE_S = 60.0


def serve(broker: str, listener: socket.socket, *, hub: int) -> None:
    """Serve on the listening socket until told to stop or `hub`, the process that started this one, is gone.

    `broker` is the GPU broker's socket.
    """
    enable_pretty_logging()
    asyncio.run(_serve(broker, listener, hub))


async def _serve(broker: str, listener: socket.socket, hub: int) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    HubOAuth.instance(cache_max_age=TRUST_S)
    watch, acts = Watch(broker), Acts(broker)
    server = HTTPServer(
        _application(watch, acts),
        xheaders=True,
        max_body_size=_MOST_BODY,
        body_timeout=_BODY_S,
        idle_connection_timeout=_IDLE_S,
    )
    server.add_socket(listener)
    watch.start()
    log.info("the page about the GPUs is at %s", os.environ["JUPYTERHUB_SERVICE_PREFIX"])
    try:
        while not stop.is_set() and os.getppid() == hub:
            try:
                await asyncio.wait_for(stop.wait(), _LOOK_S)
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


def _log_request(handler: web.RequestHandler) -> None:
    """One line, without the query: it may hold an XSRF token or a login's code."""
    request = handler.request
    level = logging.DEBUG if handler.get_status() < 400 else logging.INFO
    log.log(level, "%s %s -> %d", request.method, request.path[:200], handler.get_status())
