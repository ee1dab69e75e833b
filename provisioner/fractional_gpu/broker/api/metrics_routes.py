"""How Prometheus asks: on the broker's socket, and by TCP where an administrator wants it.

`GET /v1/metrics` is for whoever may connect to the socket, `GET /metrics` for whoever reaches the address. Both tell totals, and
nobody's name. The TCP listener knows that one route, keeps few connections, and closes those on which nothing comes; where its address
cannot be had, the broker's log says so and the broker serves without it.
"""

import asyncio
import logging
import socket
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry
from tornado import iostream, web
from tornado.httpserver import HTTPServer

from fractional_gpu.broker.api.handler import Handler
from fractional_gpu.broker.api.lease_service import Service
from fractional_gpu.broker.api.listener import PatientListener
from fractional_gpu.broker.api.metrics_view import View
from fractional_gpu.broker.api.server import Server

__all__ = ["METRICS_ROUTES", "add_view", "listen"]

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 16
_SECONDS = 10.0  # a request, and a pause between two on a connection
_MOST_BYTES = 8 * 1024


def add_view(service: Service, server: Server) -> None:
    """Let the broker's registry have what is read off the books, and its process."""
    registry = service.broker.metrics.registry
    registry.register(View(service, server.connections))
    ProcessCollector(registry=registry)


class _Metrics(Handler):
    def get(self) -> None:
        encode, content_type = choose_encoder(self.request.headers.get("Accept", ""))
        self.reply_with(encode(self.service.broker.metrics.registry), content_type)


METRICS_ROUTES: tuple[tuple[str, type[Handler]], ...] = (("/v1/metrics", _Metrics),)


class _ByTCP(web.RequestHandler):
    def initialize(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def get(self) -> None:
        encode, content_type = choose_encoder(self.request.headers.get("Accept", ""))
        self.set_header("Content-Type", content_type)
        self.set_header("Server", "jupyter-fractional-gpu")
        taken = self.finish(encode(self._registry))
        patience = asyncio.get_running_loop().call_later(_SECONDS, self._give_up, taken)
        taken.add_done_callback(lambda _: patience.cancel())

    def _give_up(self, taken: "asyncio.Future[None]") -> None:
        if not taken.done():
            connection: Any = self.request.connection
            connection.stream.close()

    def write_error(self, status_code: int, **_: Any) -> None:  # noqa: ANN401 - tornado's own
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish("metrics are at GET /metrics\n" if status_code < 500 else "the broker failed; its log says why\n")


class _Few(HTTPServer):
    """Turns away whoever is one too many."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - tornado's own
        self._open: set[object] = set()
        super().initialize(*args, **kwargs)

    def handle_stream(self, stream: iostream.IOStream, address: tuple[Any, ...]) -> None:
        if len(self._open) >= _MOST_CONNECTIONS:
            stream.close()
            return
        self._open.add(stream)
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        self._open.discard(getattr(server_conn, "stream", None))
        super().on_close(server_conn)


def listen(registry: CollectorRegistry, address: tuple[str, int]) -> HTTPServer | None:
    """Serve the registry by TCP; None, and a line in the log, where the address cannot be had. The caller stops it."""
    host, port = address
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
    except OSError as error:
        log.error("no metrics on %s, port %d: %s; free it or change c.GPUBroker.metrics_address", host, port, error)  # noqa: TRY400
        return None
    application = web.Application(
        [("/metrics", _ByTCP, {"registry": registry})],
        default_handler_class=_Missing,
        default_handler_args={"registry": registry},
        log_function=_say_nothing,
    )
    server = _Few(
        application,
        max_header_size=_MOST_BYTES,
        max_body_size=_MOST_BYTES,
        max_buffer_size=2 * _MOST_BYTES,
        idle_connection_timeout=_SECONDS,
        body_timeout=_SECONDS,
    )
    server.add_socket(PatientListener.of(listener))
    log.info("metrics on %s, port %d", host, port)
    return server


class _Missing(_ByTCP):
    def prepare(self) -> None:
        raise web.HTTPError(404)


def _say_nothing(_handler: web.RequestHandler) -> None:
    """Leave a scrape every few seconds out of the log."""
