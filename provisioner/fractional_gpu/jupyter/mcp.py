"""MCP tools for AI agents. They are thin wrappers around the broker's client. jupyter-server-mcp finds them through entry points.

Tools take memory in MiB and times in seconds. When a tool fails, it raises an error whose text is JSON with `code`, `reason`, and a
`message` that says what to do. `python -m fractional_gpu.jupyter.mcp` prints the schemas of all tools and the error codes. The tools act as
the user who runs the Jupyter server, and their reservations end when the server exits.
"""

import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec

import msgspec

from fractional_gpu.client.claims import take_claim
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import socket_path
from fractional_gpu.client.seat import own_seat
from fractional_gpu.client.threads import in_thread
from fractional_gpu.protocol import accounts, errors, messages, status
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError, NoRoomError

_LONGEST_WAIT_S = 3600
_Arguments = ParamSpec("_Arguments")
Answer = dict[str, Any]


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """GPU memory reserved for this user's programs. Start the programs with `environment`, which binds them to the device."""

    lease_id: str
    device_id: str
    ends_in_ms: int
    environment: dict[str, str]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a lease, with its measured use, advice on its share, and the reasons for everything that has happened to it."""

    lease: status.LeaseStatus
    story: list[status.StoryLine]


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease and its user have used, and what is left in the budgets this user may see."""

    cost: accounts.Cost
    budgets: list[accounts.BudgetStatus]


TOOLS: dict[str, tuple[Callable[..., Any], type[msgspec.Struct], bool]] = {}
"""Maps each tool's name to its function, its return type, and whether it is read-only."""


def tool(
    answer: type[msgspec.Struct], *, reads: bool = False
) -> Callable[[Callable[_Arguments, msgspec.Struct]], Callable[_Arguments, Answer]]:
    def register(function: Callable[_Arguments, msgspec.Struct]) -> Callable[_Arguments, Answer]:
        @wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Answer:
            try:
                reply: Answer = msgspec.to_builtins(function(*args, **kwargs))
            except FractionalGPUError as error:
                body = {"code": error.code, "reason": error.reason, "message": str(error)}
                raise _failure()(json.dumps(body)) from error
            return reply

        call.__annotations__["return"] = Answer
        TOOLS[function.__name__] = call, answer, reads
        return call

    return register


def waiting(function: Callable[_Arguments, Answer]) -> Callable[_Arguments, Awaitable[Answer]]:
    """Make a blocking tool run in its own thread, because the server has few threads and must not wait for this one when it exits."""

    @wraps(function)
    async def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Answer:
        return await in_thread(function, *args, **kwargs)

    TOOLS[function.__name__] = call, *TOOLS[function.__name__][1:]
    return call


def _failure() -> type[Exception]:
    """Return the one exception class that lets servers show an error's text to agents."""
    from fastmcp.exceptions import ToolError  # noqa: PLC0415 - only servers for agents have this package

    kind: type[Exception] = ToolError
    return kind


def _client() -> BrokerClient:
    seat = own_seat()
    return BrokerClient(socket_path(), token=None if seat is None else seat.token)


@tool(status.HostStatus, reads=True)
def gpu_status() -> status.HostStatus:
    """Show the GPUs, their free memory, and who holds or is waiting for GPU memory. Start here to find the ids of your leases."""
    with _client() as client:
        return client.status(fresh=True)


@waiting
@tool(Reservation)
def gpu_reserve(memory_mib: int, seconds: int = 600, wait_s: int = 60, agent: str = "") -> Reservation:
    """Reserve GPU memory for programs you start yourself, waiting up to `wait_s` seconds for room. Release it when you are done.

    The reservation ends after `seconds`, or when the Jupyter server exits. Start your programs with the returned environment. Notebook
    kernels need no reservation, since they have their own share. `agent` is your name, which is shown to people. Fails with `no-room` if no
    room becomes available in time.
    """
    request = messages.LeaseRequest(
        fraction_milli=0, memory_mib=memory_mib, ttl_ms=seconds * 1000, holder_pid=os.getpid(), label=agent or "agent"
    )
    lease, device, environment = take_claim(request, wait_ms=min(max(wait_s, 0), _LONGEST_WAIT_S) * 1000)
    return Reservation(
        lease_id=lease.lease_id,
        device_id=device.device_id,
        ends_in_ms=lease.lease.pinned_until_ms - lease.now_ms,
        environment=dict(environment),
    )


@waiting
@tool(status.LeaseStatus)
def gpu_wait(lease_id: str, wait_s: int = 60) -> status.LeaseStatus:
    """Bring a suspended kernel back to its GPU, waiting up to `wait_s` seconds. Fails with `no-room` if this takes longer."""
    waits_for: list[str] = []

    def give_up() -> None:
        try:
            with _client() as other:
                waits_for.append(other.lease(lease_id).sentence)
        finally:
            client.close()

    with _client() as client:
        timer = threading.Timer(min(max(wait_s, 0), _LONGEST_WAIT_S), give_up)
        timer.daemon = True  # so the server can exit without waiting for it
        timer.start()
        try:
            return client.resume(lease_id)
        except BrokerUnavailableError as error:
            if not waits_for:
                raise
            sentence = f"not on the GPU within {wait_s} s: {waits_for[0]}; wait again, or ask for less"
            raise NoRoomError(sentence, reason="timeout") from error
        finally:
            timer.cancel()


@tool(messages.Done)
def gpu_release(lease_id: str) -> messages.Done:
    """End a reservation to free its memory for others. Does nothing if it has already ended. Other leases end when their programs exit."""
    with _client() as client, suppress(errors.NotFoundError):
        if (kind := client.lease(lease_id).kind) != messages.CLAIM:
            raise errors.ConflictError(f"this lease is a {kind}'s: end the {kind} instead", reason=kind)
        client.release(lease_id)
    return messages.Done()


@waiting
@tool(status.LeaseStatus)
def gpu_resize(lease_id: str, memory_mib: int, wait_s: int = 60) -> status.LeaseStatus:
    """Change how much GPU memory a kernel may use. The kernel keeps its variables. Fails if its current memory use does not fit."""
    request = messages.ResizeRequest(memory_mib=memory_mib, wait_ms=min(max(wait_s, 0), _LONGEST_WAIT_S) * 1000)
    with _client() as client:
        return client.resize(lease_id, request)


@tool(Explanation, reads=True)
def gpu_explain(lease_id: str) -> Explanation:
    """Explain a lease: what it uses, whether its share is the right size, why it is waiting or was suspended, and what happened before."""
    with _client() as client:
        return Explanation(lease=client.lease(lease_id, fresh=True), story=client.story(lease_id).lines)


@tool(Costs, reads=True)
def gpu_cost(lease_id: str) -> Costs:
    """Show what a lease and its user have used, what it cost, and what is left in the budgets."""
    with _client() as client:
        return Costs(cost=client.cost(lease_id), budgets=client.budgets().budgets)


def tool_names() -> list[str]:
    """Return the tools' names in the form `module:function`, for the entry point `jupyter_server_mcp.tools`."""
    return [f"{__name__}:{name}" for name in TOOLS]


def middleware() -> Any:  # noqa: ANN401 - fastmcp's
    """Return middleware that marks read-only tools and gives each tool its schema.

    jupyter-server-mcp calls this function through the entry point `jupyter_server_mcp.middleware`.
    """
    from fastmcp.server.middleware import Middleware  # noqa: PLC0415 - as above
    from mcp.types import ToolAnnotations  # noqa: PLC0415 - as above

    class Described(Middleware):  # type: ignore[misc] # not installed with this project
        async def on_list_tools(self, context: Any, call_next: Any) -> Sequence[Any]:  # noqa: ANN401 - as above
            return [_described(one, ToolAnnotations) for one in await call_next(context)]

    return Described()


def _described(listed: Any, annotations: type) -> Any:  # noqa: ANN401 - as above
    if listed.name not in TOOLS:
        return listed
    _, answer, reads = TOOLS[listed.name]
    hints = annotations(readOnlyHint=reads, destructiveHint=False, openWorldHint=False)
    return listed.model_copy(update={"annotations": hints, "output_schema": _schema(answer)})


def _schema(answer: type[msgspec.Struct]) -> Answer:
    return {"type": "object", **msgspec.json.schema(answer)}  # MCP requires the type at the top level


def schemas() -> Answer:
    """Return what agents rely on: the JSON schema of each tool's answer, and the error codes."""
    return {
        "version": 1,
        "tools": {name: _schema(answer) for name, (_, answer, _) in TOOLS.items()},
        "errors": {kind.code: {"description": kind.__doc__} for kind in FractionalGPUError.__subclasses__()},
    }


if __name__ == "__main__":
    json.dump(schemas(), sys.stdout, indent=2)
