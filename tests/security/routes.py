"""Who may call what: every route and method of the broker's API, tried by everybody who could.

    python -m tests.security.routes > docs/routes.md

The routes come from `protocol.routes`, the answers from a broker that runs. Needs root: the roles are real users.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from fractional_gpu.protocol.messages import LeaseRequest
from fractional_gpu.protocol.routes import RELEASE, ROUTES, Nothing, Route
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

    route: Route[Any, Any]
    role: str
    status: int
    refused: str


def routes_of() -> list[Route[Any, Any]]:
    """Every route; the one that ends a lease comes last."""
    routes = sorted(ROUTES, key=lambda route: (route.path, route.method))
    return [route for route in routes if route is not RELEASE] + [RELEASE]


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
        named = {"lease": lease_id, "seat": "no-such-seat", "device": device, "pool": "default"}
        calls: list[tuple[str, str, str | None, object]] = [
            (route.method, route.path.format(**named), sent, {}) for route in routes_of()
        ]
        for route, (status, reply) in zip(routes_of(), _call(user, live, calls), strict=True):
            reason = reply.get("error", {}).get("reason", "") if status in (401, 403, 404) else ""
            cells.append(Cell(route, role, status, "" if reason == "unknown-seat" else reason))
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
        "| route | what it is for | request | reply | " + " | ".join(ROLES) + " |",
        "|---|---|---|---|" + "---|" * len(ROLES),
    ]
    for route in routes_of():
        by_role = {cell.role: cell for cell in cells if cell.route is route}
        words = [
            f"{by_role[role].status} {by_role[role].refused}" if by_role[role].refused else "yes" for role in ROLES
        ]
        request, reply = (
            "" if kind is Nothing else f"`{kind.__name__}`" for kind in (route.request_type, route.reply_type)
        )
        reply = f"lines of {reply}" if route.lines else reply
        audited = f" (audited: `{route.audited}`)" if route.audited else ""
        lines.append(
            f"| `{route.method} {route.path}` | {route.does}{audited} | {request} | {reply} | {' | '.join(words)} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with live_broker() as running:
        print(table(probe(running)), end="")  # noqa: T201 - a command
