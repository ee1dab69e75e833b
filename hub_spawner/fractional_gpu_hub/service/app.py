"""The web service behind the hub's GPU page: its process and its routes.

The environment contains the addresses of the service and of the hub's API, which the service uses to identify users. The process exits on
SIGTERM, or when the hub that started it is gone, because the next hub starts its own.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jupyterhub.services.auth import HubOAuth, HubOAuthCallbackHandler, HubOAuthenticated, UserNotAllowed
from tornado import iostream, web
from tornado.httpserver import HTTPServer
from tornado.log import enable_pretty_logging

from fractional_gpu import pages
from fractional_gpu.protocol.errors import BadRequestError, FractionalGPUError
from fractional_gpu.protocol.limits import TAKEN_S
from fractional_gpu_hub.service.actions import Actions
from fractional_gpu_hub.service.broker_follower import BrokerFollower
from fractional_gpu_hub.service.cluster import ClusterFollower, ClusterSnapshot, cluster_view, reader_of
from fractional_gpu_hub.service.configuration import ADMIN_SCOPE, READ_SCOPE
from fractional_gpu_hub.service.usage import BY, DATES, PERIODS, chosen, csv_of, shown
from fractional_gpu_hub.service.views import Viewer, pool_settings, view_of

# - The hub identifies the user and the scopes, through OAuth for browsers and a hub token for programs. Its answer is valid for `TRUST_S`,
#   and a stream checks it again after `STREAM_TRUST_S`. So a logout, or the revocation of a scope or token, takes effect within the sum of
#   both times.
# - Creating events for open pages takes at most a twentieth of the service's time. The more pages are open, the fewer events each page
#   gets.
# - Cookies alone are no proof. Except for plain page views, each request must have JupyterHub's XSRF token, and a request that another site
#   has caused is refused before it is handled. Programs send a token, so neither applies to them.

TRUST_S = 8
STREAM_TRUST_S = 20.0
STREAM_S = 120.0
QUIET_S = 10.0  # after this time, the stream sends a comment, or figures that change with time
_MOST_STREAMS = 16  # for each user
_SHARE = 20  # after an event, a page pauses for this factor times the time to create it times the number of open pages
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FORMS = ("form-action 'none'", "form-action 'self'")


class _BaseHandler(HubOAuthenticated, web.RequestHandler):  # type: ignore[misc] # untyped
    """Identifies the user, and refuses forbidden requests before they are handled."""

    viewer: Viewer
    _cached_hub_user: dict[str, Any] | None  # JupyterHub's library sets this to the user of the cookie or token

    def initialize(self, follower: Any, actions: Actions, streams: Counter[str]) -> None:  # noqa: ANN401 - for a broker or a cluster
        self.follower, self.actions, self.streams = follower, actions, streams

    def set_default_headers(self) -> None:
        self.clear_header("Server")
        for name, value in _HEADERS.items():
            self.set_header(name, value)

    async def prepare(self) -> None:
        _refuse_other_sites(self.request)
        await self.hub_auth.get_user(self, sync=False)  # one call to the hub, in a thread
        user = self.current_user
        if user is None:
            if self._cached_hub_user:  # this is a user of the hub who has no access to this service
                raise web.HTTPError(403)
            self.not_logged_in()
            return
        self.check_xsrf_cookie()
        viewer = _viewer_of(user)
        if viewer is None:
            raise web.HTTPError(403, log_message="no scope", reason="Forbidden")
        self.viewer = viewer

    def not_logged_in(self) -> None:
        raise web.HTTPError(401)

    def view(self) -> dict[str, Any]:
        found = self.follower.snapshot
        return cluster_view(found, self.viewer) if isinstance(found, ClusterSnapshot) else view_of(found, self.viewer)

    def write_error(self, status_code: int, **kwargs: Any) -> None:  # noqa: ANN401 - tornado's own
        error = kwargs.get("exc_info", (None, None, None))[1]
        shown = {"code": "error", "reason": str(status_code), "message": _SENTENCES.get(status_code, _SENTENCES[500])}
        if isinstance(error, FractionalGPUError):
            shown = {"code": error.code, "reason": error.reason, "message": str(error)}
            self.set_status(error.status)
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"error": shown}))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:  # noqa: ANN401 - tornado's own
        """Log the service's own faults with a traceback, and refused requests on one line without their content."""
        if isinstance(value, FractionalGPUError | web.HTTPError):
            log.info("%s %s refused: %s", self.request.method, self.request.path[:200], getattr(value, "status", value))
        elif not isinstance(value, iostream.StreamClosedError):
            log.error("%s %s failed", self.request.method, self.request.path[:200], exc_info=(typ, value, tb))


def _viewer_of(user: Mapping[str, Any]) -> Viewer | None:
    scopes = set(user.get("scopes", ()))
    if user.get("kind") != "user" or not scopes & {READ_SCOPE, ADMIN_SCOPE}:
        return None
    return Viewer(name=user["name"], admin=ADMIN_SCOPE in scopes, groups=tuple(user.get("groups") or ()))


_SENTENCES = {
    400: "the request is malformed",
    401: "you are not logged in: log in to the hub and reload the page",
    403: "this is not allowed: the page may be out of date (reload it), or your account has no access to the GPU page",
    404: "there is no such page",
    405: "this address does not support that method",
    413: "the request is too large",
    429: "you have too many pages of this kind open: close some",
    500: "the service failed; see its log",
    502: "the hub is not responding: try again in a moment",
    503: "the hub is not responding: try again in a moment",
}


class _Html(_BaseHandler):
    def not_logged_in(self) -> None:
        self.redirect(self.get_login_url())

    def write_error(self, status_code: int, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - tornado's own
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        sentence = _SENTENCES.get(status_code, _SENTENCES[500])
        self.finish(f"{status_code}: {sentence[:1].upper()}{sentence[1:]}.\n")

    def show(self, template: str, **values: Any) -> None:  # noqa: ANN401 - any values that the template needs
        self.set_header("Content-Type", "text/html; charset=utf-8")
        loaded = self.settings["templates"].get_template(template)
        self.finish(loaded.render(prefix=self.hub_auth.base_url, hub=self.hub_auth.hub_prefix, **values))


class _Page(_Html):
    def get(self) -> None:
        is_cluster, xsrf = isinstance(self.follower, ClusterFollower), self.xsrf_token
        self.show(
            "cluster.html" if is_cluster else "page.html", view=self.view(),
            xsrf=xsrf.decode() if isinstance(xsrf, bytes) else xsrf,
            settings=pool_settings() if self.viewer.admin else None,
        )  # fmt: skip


class _Usage(_Html):
    """The "My usage" page, and the "Usage" page for administrators. Both are also available as CSV."""

    def set_default_headers(self) -> None:
        """Allow the browser to submit the form for choosing the period."""
        super().set_default_headers()
        self.set_header("Content-Security-Policy", _HEADERS["Content-Security-Policy"].replace(*_FORMS))

    async def get(self, everybody: str | None, kind: str | None) -> None:
        ask = self.actions.all_usage if everybody else self.actions.own_usage
        given = {name: self.get_query_argument(name, "") for name in ("period", "since", "until", "by")}
        query, figures, problem = given, None, ""
        try:
            asked = chosen(given, everybody=bool(everybody))
            query, figures = asked.query, await ask(self.viewer, asked)
        except FractionalGPUError as error:
            self.set_status(error.status)
            problem = f"{str(error)[:1].upper()}{str(error)[1:]}."
        if kind and figures is not None:
            self.set_header("Content-Type", "text/csv; charset=utf-8")
            self.set_header("Content-Disposition", 'attachment; filename="gpu-usage.csv"')
            self.finish(await asyncio.to_thread(csv_of, figures))
        elif kind:
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(f"{problem}\n")
        else:
            address = f"{self.hub_auth.base_url}usage{everybody or ''}"
            parts = await asyncio.to_thread(shown, figures) if figures is not None else None
            self.show(
                "usage.html", title="Usage" if everybody else "My usage", you=self.viewer, everybody=everybody, address=address,
                periods=PERIODS, dates=DATES, by=BY, query=query, figures=parts, problem=problem,
            )  # fmt: skip


class _Status(_BaseHandler):
    def get(self) -> None:
        self.finish(self.view())


class _WhileConnected(_BaseHandler):
    _work: "asyncio.Task[Any] | None" = None

    async def _run(self, work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - any result of the work
        """Return the result of `work`. If the browser disconnects, cancel the work and return None."""
        self._work = asyncio.create_task(work)
        await asyncio.wait([self._work])
        return None if self._work.cancelled() else self._work.result()

    def on_connection_close(self) -> None:
        if self._work is not None:
            self._work.cancel()


class _Events(_WhileConnected):
    """The event stream of one page. Each event contains the complete current view, so events never need to be queued."""

    async def get(self) -> None:
        name = self.viewer.name
        if self.streams[name] >= _MOST_STREAMS:
            raise web.HTTPError(429)
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("X-Accel-Buffering", "no")
        self.streams[name] += 1
        try:
            with suppress(iostream.StreamClosedError):
                await self._run(self._stream())
        finally:
            self.streams[name] -= 1
            if not self.streams[name]:
                del self.streams[name]

    async def _stream(self) -> None:
        begun_s, sent = time.monotonic(), ""
        checked_s = begun_s
        while time.monotonic() < begun_s + STREAM_S:
            changed = self.follower.changed
            if time.monotonic() >= checked_s + STREAM_TRUST_S:
                checked_s = time.monotonic()
                if not await self._may_go_on():
                    return
            made_s = time.monotonic()
            news = json.dumps(self.view())
            made_s = time.monotonic() - made_s
            self.write(f"data: {news}\n\n" if news != sent else ": nothing new\n\n")
            sent = news
            await self._taken()
            await asyncio.sleep(min(QUIET_S, _SHARE * made_s * self.streams.total()))
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), QUIET_S)

    async def _taken(self) -> None:
        """Send the data written so far. Raises StreamClosedError if the browser disconnects or does not read the data in time.

        Without this time limit, a hung browser or a broken connection would occupy one of the user's streams forever.
        """
        try:
            async with asyncio.timeout(TAKEN_S):
                await self.flush()
        except TimeoutError:
            connection: Any = self.request.connection
            connection.stream.close()
            raise iostream.StreamClosedError from None

    async def _may_go_on(self) -> bool:
        hub = self.hub_auth
        try:
            user = await hub.user_for_token(
                hub.get_token(self), use_cache=False, session_id=hub.get_session_id(self), sync=False
            )
            viewer = _viewer_of(self.check_hub_user(user)) if user is not None else None
        except (UserNotAllowed, web.HTTPError) as error:  # if the hub refuses or does not answer, the page reconnects
            log.info("stopped sending events to a page: %s", error)
            return False
        if viewer is None or viewer.name != self.viewer.name:
            return False
        self.viewer = viewer
        return True


class _ActionHandler(_WhileConnected):
    async def get(self, kind: str, name: str, action: str = "") -> None:
        if action != "story":
            raise web.HTTPError(405)
        await self._act(kind, name, action, b"")

    async def post(self, kind: str, name: str, action: str = "change") -> None:
        if self.request.headers.get("Content-Type", "").split(";")[0].strip() != "application/json":
            raise BadRequestError("the body is not JSON: send Content-Type: application/json", reason="bad-body")
        await self._act(kind, name, action, bytes(self.request.body))

    async def _act(self, kind: str, name: str, action: str, body: bytes) -> None:
        answer = await self._run(self.actions.act(self.viewer, kind, name, action, body))
        if answer is not None:
            self.finish(json.dumps(answer))
            self.follower.refresh_soon()


class NotFoundHandler(_BaseHandler):
    async def prepare(self) -> None:  # there is nothing to see, so do not identify the user
        raise web.HTTPError(404)


class _Callback(HubOAuthCallbackHandler):  # type: ignore[misc] # untyped
    def set_default_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.set_header(name, value)


class _Static(web.StaticFileHandler):
    def set_extra_headers(self, path: str) -> None:  # noqa: ARG002 - tornado's own
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-cache")  # browsers must revalidate it each time


def _refuse_other_sites(request: Any) -> None:  # noqa: ANN401 - tornado's own
    """Raise HTTPError if the request was caused by a page from another origin, unless it is a plain page view."""
    headers = request.headers
    if "Authorization" in headers or (
        request.method in {"GET", "HEAD"} and headers.get("Sec-Fetch-Mode") == "navigate"
    ):
        return
    site, origin = headers.get("Sec-Fetch-Site", "same-origin"), headers.get("Origin")
    if site not in {"same-origin", "none"} or (origin is not None and urlsplit(origin).netloc != headers.get("Host")):
        raise web.HTTPError(403, "sent from another site")


def routes(prefix: str, follower: BrokerFollower | ClusterFollower, actions: Actions, static: str) -> list[Any]:
    """Return the routes under `prefix`, which ends with a slash. A cluster page has no actions. `docs/hub.md` describes the API."""
    shared = {"follower": follower, "actions": actions, "streams": Counter[str]()}
    found: list[Any] = [
        (prefix, _Page, shared),
        (prefix + "oauth_callback", _Callback),
        (prefix + "api/status", _Status, shared),
        (prefix + "api/events", _Events, shared),
        (prefix + r"static/(page\.js|page\.css)", _Static, {"path": static}),
    ]
    if isinstance(follower, ClusterFollower):
        return found
    return [
        *found,
        (prefix + r"usage(/all)?(\.csv)?", _Usage, shared),
        (prefix + r"api/(leases|seats)/([0-9a-zA-Z_-]{1,64})/([a-z]{1,20})", _ActionHandler, shared),
        (prefix + r"api/(devices)/([^/]{1,200})/([a-z]{1,20})", _ActionHandler, shared),
        (prefix + r"api/(pools)/([0-9a-z._-]{1,63})", _ActionHandler, shared),
        (prefix + r"static/(report\.css)", _Static, {"path": Path(pages.__file__).parent / "templates"}),
    ]


log = logging.getLogger("fractional_gpu_hub.service")
_HERE = Path(__file__).parent
_HUB_POLL_S = 0.5  # the interval between checks of the hub's process
_MOST_BODY = 64 * 1024
_BODY_S = 10.0
_IDLE_S = 60.0


def serve(broker: str, listener: socket.socket, *, hub: int, cluster: str = "") -> None:
    """Serve until SIGTERM or SIGINT, or until the hub (pid `hub`) is gone. `cluster` is the engine whose nodes are shown, if any."""
    enable_pretty_logging()
    asyncio.run(_serve(broker, listener, hub, cluster))


async def _serve(broker: str, listener: socket.socket, hub: int, cluster: str = "") -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    HubOAuth.instance(cache_max_age=TRUST_S)
    follower: BrokerFollower | ClusterFollower = (
        ClusterFollower(reader_of(cluster)) if cluster else BrokerFollower(broker)
    )
    actions = Actions(broker)
    server = HTTPServer(
        _application(follower, actions),
        xheaders=True,
        max_body_size=_MOST_BODY,
        body_timeout=_BODY_S,
        idle_connection_timeout=_IDLE_S,
    )
    server.add_socket(listener)
    follower.start()
    log.info("the GPU page is at %s", os.environ["JUPYTERHUB_SERVICE_PREFIX"])
    try:
        while not stop.is_set() and os.getppid() == hub:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _HUB_POLL_S)
    finally:
        server.stop()
        await server.close_all_connections()
        await follower.close()


def _application(follower: BrokerFollower | ClusterFollower, actions: Actions) -> web.Application:
    prefix, static = os.environ["JUPYTERHUB_SERVICE_PREFIX"], str(_HERE / "static")
    return web.Application(
        routes(prefix, follower, actions, static),
        # Each process has a new secret, so browsers that are logged in get a new cookie.
        cookie_secret=secrets.token_bytes(32),
        templates=pages.templates("fractional_gpu_hub.service"),
        default_handler_class=NotFoundHandler,
        default_handler_args={"follower": follower, "actions": actions, "streams": {}},
        log_function=_log_request,
    )


def _log_request(handler: web.RequestHandler) -> None:
    request = handler.request  # do not log the query, which may contain an XSRF token or the code of a login
    level = logging.DEBUG if handler.get_status() < 400 else logging.INFO
    log.log(level, "%s %s -> %d", request.method, request.path[:200], handler.get_status())
