"""Which role may call which route: every route and method of the broker's API, tried in every role.

    python -m tests.security.routes > docs/routes.md

The routes come from `protocol.routes`, the answers from a running broker. Needs root: the roles are real users.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from fractional_gpu.protocol.messages import LeaseRequest
from fractional_gpu.protocol.routes import ADMIN, ANYONE, KERNEL, LEASE, RELEASE, ROUTES, EmptyRequest, Route
from tests.broker.live import LiveBroker, live_broker

__all__ = ["ROLES", "Cell", "end_as_stranger", "probe", "routes_of", "table"]

# The owner of the leases used, and another user; the program starts as root, because other users may be unable to run
# the interpreter.
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
    """A role's result on a route. `refused` is the error's reason; empty if the call was let through, even to a later error."""

    route: Route[Any, Any]
    role: str
    status: int
    refused: str


def routes_of() -> list[Route[Any, Any]]:
    """Return every route; the one that ends a lease comes last."""
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
    """Try every route in every role, on existing leases."""
    cells = []
    _, other = _lease(live)
    device = next(iter(live.broker.devices))
    for role, (user, whose) in ROLES.items():
        lease_id, token = _lease(live)  # a new one, as some routes end it
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
    """Let another user, who even has its token, end a lease; return the lease's state afterwards."""
    lease_id, token = _lease(live)
    _call("daemon", live, [("DELETE", f"/v1/leases/{lease_id}", sent, None) for sent in (None, token)])
    return live.state(lease_id)


def table(cells: list[Cell]) -> str:
    """Return the answers as a documentation page: routes that answer every role alike share a section."""
    groups: dict[tuple[str, tuple[str, ...]], list[Route[Any, Any]]] = {}
    for route in sorted(routes_of(), key=lambda route: [ANYONE, LEASE, KERNEL, ADMIN].index(route.who)):
        by_role = {cell.role: cell for cell in cells if cell.route is route}
        answers = tuple(
            f"{by_role[role].status} {by_role[role].refused}" if by_role[role].refused else "yes" for role in ROLES
        )
        groups.setdefault((route.who, answers), []).append(route)
    lines = [_INTRODUCTION]
    for (who, answers), routes in groups.items():
        about = f", about a {'lease' if '{lease}' in routes[0].path else 'machine'}" if who == ADMIN else ""
        title = "Ending a lease" if routes == [RELEASE] else f"For {who}{about}"
        lines += [f"## {title}", "", "| answer | caller |", "|---|---|"]
        for answer in sorted(dict.fromkeys(answers), key="yes".__ne__):
            callers = [role for role, given in zip(ROLES, answers, strict=True) if given == answer]
            shown = {len(ROLES): "all", len(ROLES) - 1: "all others"}.get(len(callers), "; ".join(callers))
            lines.append(f"| {answer} | {shown} |")
        lines += ["", *map(_line, routes), ""]
    return "\n".join(lines)


_INTRODUCTION = """# Who may call what

Every route of the broker's API, with the answers of a running broker (`python -m tests.security.routes`): "yes", or the status and the
reason of the refusal. Administrators are root and the broker's own user. Another user's lease is unknown, and ending it has no
effect. In brackets: the request, the reply, and the word in the [audit log](audit.md).
"""


def _line(route: Route[Any, Any]) -> str:
    request, reply = (
        "" if kind is EmptyRequest else f"`{kind.__name__}`" for kind in (route.request_type, route.reply_type)
    )
    reply = f"lines of {reply}" if route.lines else reply
    messages = f"{request} → {reply}" if request else reply
    details = [text for text in (messages, f"audited: `{route.audited}`" if route.audited else "") if text]
    return f"- `{route.method} {route.path}`: {route.does}" + (f" ({'; '.join(details)})" if details else "")


if __name__ == "__main__":
    with live_broker() as running:
        print(table(probe(running)), end="")  # noqa: T201 - a command
