"""Who may call what: every route and method of the broker's API, tried by everybody who could.

    python -m tests.security.routes > docs/routes.md

The routes come from the server itself, the answers from a broker that runs. Needs root: the roles are real users.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from fractional_gpu.protocol.messages import LeaseRequest
from tests.broker.live import LiveBroker, live_broker

__all__ = ["ROLES", "Cell", "end_as_stranger", "probe", "routes_of", "table"]

# The owner of the leases that are tried, and somebody else; the program begins as root because of where the interpreter lies.
_CALLER = """
import http.client, json, os, pwd, socket, sys
user, path, calls = json.load(sys.stdin)
if user != "root":
    entry = pwd.getpwnam(user)
    os.setgroups([]); os.setgid(entry.pw_gid); os.setuid(entry.pw_uid)

class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(path)

answers = []
for method, target, token, body in calls:
    connection = Connection("broker")
    headers = {} if token is None else {"Authorization": "Bearer " + token}
    connection.request(method, target, json.dumps(body) if method == "POST" else None, headers)
    reply = connection.getresponse()
    error = {}
    if reply.status >= 400 or (method, target) == ("POST", "/v1/leases"):
        error = json.loads(reply.read())
    answers.append([reply.status, error])
    connection.close()
json.dump(answers, sys.stdout)
"""
ROLES = {
    "administrator": ("root", None),
    "owner, with the lease's token": ("nobody", "own"),
    "owner, without a token": ("nobody", None),
    "owner, with another lease's token": ("nobody", "other"),
    "another user": ("daemon", None),
    "another user, with the lease's token": ("daemon", "own"),
}
"""By name: the user, and whose token is sent."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one role got from one route. `refused` is the error's reason, empty for who was let through (to an error of its own, maybe)."""

    route: str
    role: str
    status: int
    refused: str


def routes_of(live: LiveBroker) -> list[tuple[str, str]]:
    """Return method and path of every route that the server has; L, S, D and P stand for a lease, a seat, a device and a pool."""
    application: Any = live.server.request_callback
    found = [route for rule in application.wildcard_router.rules for route in _methods(rule)]
    return sorted(found)


def _methods(rule: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - tornado is untyped here
    path = rule.matcher.regex.pattern.removesuffix("$")
    for noun, letter in (("leases", "L"), ("seats", "S"), ("devices", "D"), ("pools", "P")):
        path = re.sub(rf"(/{noun}/)\([^)]*\)", rf"\1{letter}", path)
    for method in ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"):
        function = getattr(rule.target, method.lower())
        if getattr(function, "__name__", "") != "_unimplemented_method":
            yield method, path


def _call(user: str, live: LiveBroker, calls: Sequence[tuple[str, str, str | None, object]]) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-S", "-c", _CALLER],
        input=json.dumps([user, live.socket, calls]),
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    answers: list[Any] = json.loads(done.stdout)
    return answers


def _lease(live: LiveBroker) -> tuple[str, str]:
    """Take a lease as its owner; return its id and its token."""
    request = to_builtins(LeaseRequest(fraction_milli=125))
    ((status, reply),) = _call("nobody", live, [("POST", "/v1/leases", None, request)])
    assert status == 200, reply
    return reply["lease_id"], reply["token"]


def probe(live: LiveBroker) -> list[Cell]:
    """Try every route as everybody, on leases that exist."""
    cells = []
    _, other = _lease(live)
    device = next(iter(live.broker.devices))
    for role, (user, whose) in ROLES.items():
        lease_id, token = _lease(live)  # a fresh one: some of this ends it
        sent = {"own": token, "other": other, None: None}[whose]
        routes = [route for route in routes_of(live) if route != ("DELETE", "/v1/leases/L")]
        routes.append(("DELETE", "/v1/leases/L"))
        targets = [
            route.replace("/S", "/no-such-seat")
            .replace("/L", f"/{lease_id}")
            .replace("/D", f"/{device}")
            .replace("/P", "/default")
            for _, route in routes
        ]
        body: object = {}
        calls = [(method, target, sent, body) for (method, _), target in zip(routes, targets, strict=True)]
        for (method, route), (status, reply) in zip(routes, _call(user, live, calls), strict=True):
            reason = reply.get("error", {}).get("reason", "") if status in (401, 403, 404) else ""
            is_about_seat = route.startswith("/v1/seats/S") and reason == "unknown-seat"
            cells.append(Cell(f"{method} {route}", role, status, "" if is_about_seat else reason))
        live.call("POST", f"/v1/devices/{device}/undrain", {})
    return cells


def end_as_stranger(live: LiveBroker) -> str:
    """Let another user, who has even its token, end a lease; return the state it is in afterwards."""
    lease_id, token = _lease(live)
    _call("daemon", live, [("DELETE", f"/v1/leases/{lease_id}", sent, None) for sent in (None, token)])
    return live.state(lease_id)


def table(cells: list[Cell]) -> str:
    """Return the answers as a page of documentation."""
    lines = [
        "# Who may call what",
        "",
        "Every route of the broker's API, tried on a running broker by everybody who could (`python -m tests.security.routes`).",
        '"yes": let through; otherwise the status and the reason of the refusal. A lease of somebody else is "unknown": whether it',
        "exists is nobody's business. Administrators are root and the broker's own user.",
        "",
        "| route | " + " | ".join(ROLES) + " |",
        "|---|" + "---|" * len(ROLES),
    ]
    for route in dict.fromkeys(cell.route for cell in cells):
        by_role = {cell.role: cell for cell in cells if cell.route == route}
        words = [
            f"{by_role[role].status} {by_role[role].refused}" if by_role[role].refused else "yes" for role in ROLES
        ]
        lines.append(f"| `{route}` | " + " | ".join(words) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with live_broker() as running:
        print(table(probe(running)), end="")  # noqa: T201 - a command
