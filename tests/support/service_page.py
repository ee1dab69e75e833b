"""A user at the hub's page about its GPUs: cookies, the page's XSRF token, and the actions of its script."""

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from typing import Any

from tests.hub.pages import Page, Visitor
from tests.support.hub import HubWorld
from tests.support.world import DEADLINE_S, until

__all__ = ["PAGE", "Answer", "Member"]

PAGE = "services/gpu/"


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any

    @property
    def reason(self) -> str:
        assert self.status >= 400, self
        reason: str = self.body["error"]["reason"]
        return reason


class Member(Visitor):
    def __init__(self, hub: HubWorld, name: str) -> None:
        super().__init__(hub, name)
        self.page = until(self._opened, f"{name} has the page open")

    def _opened(self) -> Page | None:
        page = self.get(PAGE)
        return None if page.status in (404, 425, 503) else page  # the service is not ready yet

    @property
    def xsrf(self) -> str:
        found = re.search(r'data-xsrf="([^"]*)"', self.page.html)
        assert found, self.page.html
        return unescape(found[1])

    def ask(self, path: str, body: object = None, *, xsrf: str | None = "", **headers: str) -> Answer:
        """A request of the page's script, a POST with a body. `xsrf`: None without the token, empty for the page's."""
        request = self._request(path, body, self.xsrf if xsrf == "" else xsrf, headers)
        try:
            with self._opener.open(request, timeout=DEADLINE_S) as reply:
                return Answer(reply.status, json.loads(reply.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, json.loads(error.read()))

    def _request(self, path: str, body: object, xsrf: str | None, headers: dict[str, str]) -> urllib.request.Request:
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"{self._hub.url}{PAGE}api/{path}", data=None if body is None else json.dumps(body).encode()
        )
        sent = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Content-Type": "application/json"}
        if xsrf is not None:
            sent["X-XSRFToken"] = xsrf
        for name, value in (sent | {name.replace("_", "-"): value for name, value in headers.items()}).items():
            request.add_header(name, value)
        return request

    def status(self) -> dict[str, Any]:
        answer = self.ask("status")
        assert answer.status == 200, answer
        body: dict[str, Any] = answer.body
        return body

    def sees(self, kind: str, row_id: str, field: str, *words: str) -> str:
        """Wait until a row's field has one of the words; the page is a moment behind the broker."""

        def look() -> str | None:
            rows = [row for row in self.status()[kind] if row["id"] == row_id]
            text = str(rows[0][field]) if rows else ""
            return text if any(word in text for word in words) else None

        return until(look, f"{kind} {row_id[:8]} show {field} as {' or '.join(words)}")

    @contextmanager
    def news(self) -> Iterator[Iterator[dict[str, Any]]]:
        """The page's stream of events, for the block."""
        request = self._request("events", None, self.xsrf, {})
        with self._opener.open(request, timeout=DEADLINE_S) as stream:
            yield _events(stream)


def _events(stream: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in stream:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
