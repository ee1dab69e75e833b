"""The service's process: the web application on the hub's socket, from the start to the end of the process.

The environment has the service's address and the way to the hub's API, which identifies users. The process ends with SIGTERM, and by
itself when the hub that started it is gone: the next hub starts its own.
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

from fractional_gpu_hub.service.actions import Actions
from fractional_gpu_hub.service.broker_follower import BrokerFollower
from fractional_gpu_hub.service.handlers import TRUST_S, Missing, routes

__all__ = ["serve"]

log = logging.getLogger("fractional_gpu_hub.service")
_HERE = Path(__file__).parent
_HUB_POLL_S = 0.5  # between two checks whether the hub's process is still there
_MOST_BODY = 64 * 1024
_BODY_S = 10.0
_IDLE_S = 60.0


def serve(broker: str, listener: socket.socket, *, hub: int) -> None:
    """Serve on the listening socket until SIGTERM or SIGINT, or until `hub`, the process that started this one, is gone.

    `broker` is the GPU broker's socket.
    """
    enable_pretty_logging()
    asyncio.run(_serve(broker, listener, hub))


async def _serve(broker: str, listener: socket.socket, hub: int) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    HubOAuth.instance(cache_max_age=TRUST_S)
    follower, actions = BrokerFollower(broker), Actions(broker)
    server = HTTPServer(
        _application(follower, actions),
        xheaders=True,
        max_body_size=_MOST_BODY,
        body_timeout=_BODY_S,
        idle_connection_timeout=_IDLE_S,
    )
    server.add_socket(listener)
    follower.start()
    log.info("the page about the GPUs is at %s", os.environ["JUPYTERHUB_SERVICE_PREFIX"])
    try:
        while not stop.is_set() and os.getppid() == hub:
            try:
                await asyncio.wait_for(stop.wait(), _HUB_POLL_S)
            except TimeoutError:
                continue
    finally:
        server.stop()
        actions.close()
        await server.close_all_connections()
        await asyncio.to_thread(follower.stop)


def _application(follower: BrokerFollower, actions: Actions) -> web.Application:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    prefix = os.environ["JUPYTERHUB_SERVICE_PREFIX"]
    return web.Application(
        routes(prefix, follower, actions, str(_HERE / "static")),
        cookie_secret=secrets.token_bytes(32),  # new for each process: a browser that is logged in gets a new cookie
        page=templates.get_template("page.html"),
        default_handler_class=Missing,
        default_handler_args={"follower": follower, "actions": actions, "streams": {}},
        log_function=_log_request,
    )


def _log_request(handler: web.RequestHandler) -> None:
    """One line, without the query: it may hold an XSRF token or a login's code."""
    request = handler.request
    level = logging.DEBUG if handler.get_status() < 400 else logging.INFO
    log.log(level, "%s %s -> %d", request.method, request.path[:200], handler.get_status())
