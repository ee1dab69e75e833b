"""A user on a hub's pages: plain HTTP with cookies, like a browser without scripts."""

import http.cookiejar
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from html import unescape

from tests.support.hub import HubWorld
from tests.support.world import DEADLINE_S, until

__all__ = ["Page", "Visitor"]


@dataclass(frozen=True)
class Page:
    """A response. `text` is what a user reads, without the tags."""

    status: int
    url: str
    html: str

    @property
    def text(self) -> str:
        bare = re.sub(r"<script.*?</script>|<style.*?</style>", " ", self.html, flags=re.DOTALL)
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", bare)).split())

    @property
    def error(self) -> str:
        found = re.search(r'<p class="spawn-error-msg[^>]*>(.*?)</p>', self.html, flags=re.DOTALL)
        return " ".join(unescape(re.sub(r"<[^>]*>", "", found[1])).split()) if found else ""

    @property
    def choices(self) -> dict[str, bool]:
        inputs = re.findall(r'<input type="radio"[^>]*>', self.html)
        return {
            unescape(re.search(r'value="([^"]*)"', one)[1]): " checked" in one  # type: ignore[index]
            for one in inputs
            if " disabled" not in one
        }


class Visitor:
    def __init__(self, hub: HubWorld, name: str) -> None:
        self._hub = hub
        self._jar = http.cookiejar.CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self._jar))
        self.get("hub/login")
        page = self.post("hub/login", username=name, password=hub.password)
        assert page.status == 200, page.text

    def get(self, path: str) -> Page:
        return self._open(urllib.request.Request(self._hub.url + path))  # noqa: S310 - loopback

    def post(self, path: str, **form: str) -> Page:
        token = next(cookie.value for cookie in self._jar if cookie.name == "_xsrf" and cookie.path == "/hub/")
        data = urllib.parse.urlencode({**form, "_xsrf": token or ""}).encode()
        return self._open(urllib.request.Request(self._hub.url + path, data=data))  # noqa: S310 - loopback

    def refused(self, **form: str) -> Page:
        """Ask for a server that does not start, and return the form with the reason.

        JupyterHub shows the form again for a refusal within a second. On a slow machine it takes longer, which leads to another page.
        """

        def ask() -> Page | None:
            page = self.post("hub/spawn", **form)
            return page if page.choices else None

        return until(ask, "the form is there again")

    def _open(self, request: urllib.request.Request) -> Page:
        try:
            with self._opener.open(request, timeout=DEADLINE_S) as reply:
                return Page(reply.status, reply.url, reply.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Page(error.code, error.url or "", error.read().decode())
