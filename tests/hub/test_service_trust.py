"""An open page's events follow its user's rights and cost the service little: a real service's handlers with a scripted hub."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.services.auth import HubOAuth
from tornado import web
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from fractional_gpu_hub.service import app
from fractional_gpu_hub.service.actions import Actions
from fractional_gpu_hub.service.broker_follower import BrokerFollower
from fractional_gpu_hub.service.configuration import ADMIN_SCOPE, READ_SCOPE

pytestmark = pytest.mark.promise("hub-rights")

DEADLINE_S = 60.0
ACCESS = "access:services!service=gpu"


class Hub(web.RequestHandler):
    """Says which user has a token: `scopes` are the user's current ones, None means that the token is unknown."""

    scopes: list[str] | None = None

    def get(self) -> None:
        if self.scopes is None:
            raise web.HTTPError(404)
        self.finish({"kind": "user", "name": "ada", "scopes": self.scopes, "groups": []})


@asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[int]:
    listener, port = bind_unused_port()
    server = HTTPServer(application)
    server.add_socket(listener)
    try:
        yield port
    finally:
        server.stop()
        await server.close_all_connections()


class Streams(Counter[str]):
    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    def __delitem__(self, name: object) -> None:
        super().__delitem__(str(name))
        self.ended.set()


class Page:
    def __init__(self, reader: asyncio.StreamReader, streams: Streams) -> None:
        self._reader = reader
        self.streams = streams

    async def view(self) -> dict[str, Any] | None:
        async with asyncio.timeout(DEADLINE_S):
            while line := await self._reader.readline():
                if line.startswith(b"data: "):
                    view: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                    return view
        return None


@pytest.fixture
async def follower(monkeypatch: pytest.MonkeyPatch) -> BrokerFollower:
    monkeypatch.setattr(app, "STREAM_TRUST_S", 0.0)
    monkeypatch.setenv("JUPYTERHUB_OAUTH_ACCESS_SCOPES", json.dumps([ACCESS]))
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/services/gpu/")
    return BrokerFollower("/nowhere")


@asynccontextmanager
async def opened(follower: BrokerFollower, monkeypatch: pytest.MonkeyPatch, scopes: list[str]) -> AsyncIterator[Page]:
    monkeypatch.setattr(Hub, "scopes", [ACCESS, *scopes])
    async with serving(web.Application([(r"/hub/api/user", Hub)])) as hub:
        auth = HubOAuth(api_url=f"http://127.0.0.1:{hub}/hub/api", api_token="the service's", cache_max_age=3600)  # noqa: S106
        monkeypatch.setattr(app._BaseHandler, "hub_auth", auth)
        actions = Actions("/nowhere")
        routes, streams = app.routes("/services/gpu/", follower, actions, "/nowhere"), Streams()
        for _, _, shared in [one for one in routes if len(one) == 3 and "streams" in one[2]]:
            shared["streams"] = streams
        application = web.Application(routes, cookie_secret="x")  # noqa: S106
        async with serving(application) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"GET /services/gpu/api/events HTTP/1.1\r\nHost: gpu\r\nAuthorization: token ada\r\nConnection: close\r\n\r\n"
            )
            yield Page(reader, streams)
            writer.close()
            with suppress(ConnectionResetError):
                await writer.wait_closed()
        auth._pool.shutdown()
        auth._thread_loop.close()  # the library's own thread, for calls that block


def stir(follower: BrokerFollower) -> None:
    follower._publish(problem=f"{follower.snapshot.problem}!")


async def test_a_token_that_was_taken_away_ends_the_open_stream(
    follower: BrokerFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(follower, monkeypatch, [READ_SCOPE]) as page:
        assert await page.view() is not None
        stir(follower)
        assert await page.view() is not None, "the user may still see it"
        monkeypatch.setattr(Hub, "scopes", None)
        stir(follower)
        assert await page.view() is None


@pytest.mark.parametrize("left", [[ACCESS], [READ_SCOPE]])
async def test_a_scope_that_was_taken_away_ends_the_open_stream(
    follower: BrokerFollower, monkeypatch: pytest.MonkeyPatch, left: list[str]
) -> None:
    async with opened(follower, monkeypatch, [READ_SCOPE]) as page:
        assert await page.view() is not None
        monkeypatch.setattr(Hub, "scopes", left)
        stir(follower)
        assert await page.view() is None


async def test_an_administrator_who_is_none_any_more_sees_what_users_see(
    follower: BrokerFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(follower, monkeypatch, [READ_SCOPE, ADMIN_SCOPE]) as page:
        first = await page.view()
        assert first is not None
        assert first["you"]["admin"] is True
        monkeypatch.setattr(Hub, "scopes", [ACCESS, READ_SCOPE])
        stir(follower)
        then = await page.view()
        assert then is not None
        assert then["you"]["admin"] is False


async def test_what_was_taken_away_counts_for_half_a_minute_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream begins with the oldest answer of the hub that is still trusted, and asks again as late as it may."""
    asked: list[dict[str, float]] = []
    monkeypatch.setattr(HubOAuth, "instance", lambda **options: asked.append(options))
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/services/gpu/")
    listener, _ = bind_unused_port()
    await app._serve("/nowhere", listener, hub=-1)  # which is gone
    (options,) = asked
    assert options["cache_max_age"] + app.STREAM_TRUST_S <= 30


async def test_a_browser_that_reads_nothing_keeps_no_stream(
    follower: BrokerFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The browser is stopped, or its connection broke silently: its user may still open sixteen pages."""
    monkeypatch.setattr(app, "TAKEN_S", 0.01)
    monkeypatch.setattr(app, "view_of", lambda *_arguments: {"much": "x" * 2**26})
    async with opened(follower, monkeypatch, [READ_SCOPE]) as page:
        async with asyncio.timeout(DEADLINE_S):
            await page.streams.ended.wait()
        assert not page.streams


async def test_the_more_pages_are_open_the_rarer_each_gets_an_event(
    follower: BrokerFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s, pauses_s = 0.0, list[float]()

    def dear(*_arguments: object) -> dict[str, str]:
        nonlocal clock_s
        clock_s += 0.0625
        return {}

    class Noted:
        """The module `asyncio`, with a `sleep` that notes its length and lasts until the page is closed."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            pauses_s.append(seconds)
            await asyncio.sleep(DEADLINE_S)

    monkeypatch.setattr(app, "view_of", dear)
    monkeypatch.setattr(app, "asyncio", Noted())
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: clock_s))
    async with opened(follower, monkeypatch, [READ_SCOPE]) as page:
        assert await page.view() is not None
    async with opened(follower, monkeypatch, [READ_SCOPE]) as page:
        page.streams["bob"] = 3
        assert await page.view() is not None
    async with opened(follower, monkeypatch, [READ_SCOPE]) as page:
        page.streams["bob"] = 300
        assert await page.view() is not None
    assert pauses_s == [0.0625 * app._SHARE, 4 * 0.0625 * app._SHARE, app.QUIET_S]
