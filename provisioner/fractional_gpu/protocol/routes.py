"""All routes of the broker's API, in one table for the server, the client and docs/routes.md.

The API uses HTTP and JSON over a UNIX socket. In a path, `{lease}` stands for a lease's id. Other names in braces work in the same way. GET
requests send their fields in the query, and all other requests in the body. The broker identifies peers by their uid and by `Authorization:
Bearer TOKEN`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct

from fractional_gpu.protocol.limits import MAX_LAST_MS, MAX_NOTE, MAX_WAIT_S
from fractional_gpu.protocol.messages import (
    AcquireRequest,
    AttachRequest,
    Done,
    DrainRequest,
    EvictRequest,
    ExpectRequest,
    GateAnswer,
    GateCommand,
    GateHello,
    LeaseNews,
    LeaseReply,
    LeaseRequest,
    MoveRequest,
    OthersUse,
    PinRequest,
    Pong,
    Progress,
    ResizeRequest,
    ResumeRequest,
)

if TYPE_CHECKING:
    from fractional_gpu.protocol.accounts import BudgetExtension, BudgetList, Cost, UsageQuery, UsageReport
    from fractional_gpu.protocol.nodes import Capacity
    from fractional_gpu.protocol.seats import (
        OfferRequest,
        Offers,
        PoolChange,
        PoolKeys,
        PoolList,
        SeatList,
        SeatProgress,
        SeatRequest,
    )
    from fractional_gpu.protocol.status import (
        DeviceStatus,
        History,
        HostChange,
        HostStatus,
        LeaseStatus,
        SeatStatus,
        Story,
    )

Request = TypeVar("Request", bound=Struct)
Reply = TypeVar("Reply", bound=Struct)

ANYONE, ADMIN = "anyone", "administrators"
LEASE = "the lease's user"  # and administrators; a token, if sent, must be that of the lease or its seat
KERNEL = "the lease's token"  # or a process of the kernel whose token file is gone


class EmptyRequest(Struct, frozen=True):
    """A request without fields."""


class FreshQuery(Struct, frozen=True, kw_only=True):
    """A query. If `fresh` is set, the broker samples the devices before answering."""

    fresh: bool = False


class OthersQuery(Struct, frozen=True, kw_only=True):
    """A query for what others used. It says how far to look back, and which leases to leave out (comma-separated)."""

    last_ms: Annotated[int, Meta(ge=1, le=MAX_LAST_MS)] = 1000
    without: str = ""


class NoteRequest(Struct, frozen=True, kw_only=True):
    """A user's note on a lease. An empty note removes the existing one."""

    note: Annotated[str, Meta(max_length=MAX_NOTE)]


class Route(Struct, Generic[Request, Reply], frozen=True):
    """One HTTP method on one path.

    Messages that kernels rarely need are given as strings of the form `module.Class`, and imported when they are used.
    """

    name: str
    method: str
    path: str
    request: type[Request] | str
    reply: type[Reply] | str
    who: str
    does: str
    audited: str = ""  # the audit log's word for an administrator's action on what belongs to others
    lines: bool = False  # the reply is a stream of lines (NDJSON)
    waits_s: float = 0.0  # how much more time than usual the broker may take to answer
    withdraws: bool = False  # whether the work ends if the client hangs up, as with all streams
    reserved: bool = False  # others may wait for this request, so it is served even to overdrawn users

    @property
    def request_type(self) -> type[Request]:
        """The type of the request message."""
        kind: type[Request] = _loaded(self.request)
        return kind

    @property
    def reply_type(self) -> type[Reply]:
        """The type of the reply, or of each of its lines."""
        kind: type[Reply] = _loaded(self.reply)
        return kind


def _loaded(kind: Any) -> Any:  # noqa: ANN401 - a class, or its name
    if not isinstance(kind, str):
        return kind
    module, _, name = kind.partition(".")
    return getattr(import_module(f"fractional_gpu.protocol.{module}"), name)


_END_S = 60.0  # time for SIGTERM, for SIGKILL, and for the driver to free the memory of the processes
_L = "/v1/leases/{lease}"
_D = "/v1/devices/{device}"
_S = "/v1/seats/{seat}"

# fmt: off
PING = Route("ping", "GET", "/v1/ping", EmptyRequest, Pong, ANYONE, "which broker answers")
STATUS: "Route[FreshQuery, HostStatus]" = Route("status", "GET", "/v1/status", FreshQuery, "status.HostStatus", ANYONE,
    "devices, pools and the leases that the caller may see")
EVENTS: "Route[EmptyRequest, HostChange]" = Route("events", "GET", "/v1/events", EmptyRequest, "status.HostChange", ANYONE,
    "the status, then each change; `{}` is a keep-alive", lines=True)
CAPACITY: "Route[EmptyRequest, Capacity]" = Route("capacity", "GET", "/v1/capacity", EmptyRequest, "nodes.Capacity", ANYONE,
    "how much more each pool can grant")
METRICS = Route("metrics", "GET", "/v1/metrics", EmptyRequest, EmptyRequest, ANYONE, "totals in Prometheus's text format")
USAGE: "Route[UsageQuery, UsageReport]" = Route("usage", "GET", "/v1/usage", "accounts.UsageQuery", "accounts.UsageReport", ANYONE,
    "totals of what leases used, as far as the caller may see them")
BUDGETS: "Route[EmptyRequest, BudgetList]" = Route("budgets", "GET", "/v1/budgets", EmptyRequest, "accounts.BudgetList", ANYONE,
    "the budgets that the caller may see")
EXTEND_BUDGET: "Route[BudgetExtension, BudgetList]" = Route("extend", "POST", "/v1/budgets/extend", "accounts.BudgetExtension",
    "accounts.BudgetList", ADMIN, "raise the budget of a user or a group", audited="budget.extend")

CREATE = Route("create", "POST", "/v1/leases", LeaseRequest, LeaseReply, ANYONE, "create a lease, without waiting in the queue")
SHOW: "Route[FreshQuery, LeaseStatus]" = Route("lease", "GET", _L, FreshQuery, "status.LeaseStatus", LEASE, "one lease")
RELEASE = Route("release", "DELETE", _L, EmptyRequest, Done, LEASE, "end the lease; no effect if it has ended", audited="release",
    reserved=True)
ATTACH: "Route[AttachRequest, LeaseStatus]" = Route("attach", "POST", _L + "/attach", AttachRequest, "status.LeaseStatus", KERNEL,
    "name the lease's process and its Jupyter connection")
DETACH = Route("detach", "POST", _L + "/detach", EmptyRequest, Done, KERNEL, "the process has ended or will be replaced", reserved=True)
ACQUIRE = Route("acquire", "POST", _L + "/acquire", AcquireRequest, Progress, KERNEL,
    "wait for the GPU; the last line is `granted` or `refused`; `hold` keeps the lease in use until the client hangs up", lines=True)
FOLLOW = Route("follow", "POST", _L + "/follow", EmptyRequest, LeaseNews, KERNEL, "a command's state and notices, until its lease ends",
    lines=True)
GATE = Route("gate", "POST", _L + "/gate", GateHello, GateCommand, KERNEL, "the commands to the kernel's extension", lines=True,
    reserved=True)
ANSWER = Route("answer", "POST", _L + "/answer", GateAnswer, Done, KERNEL, "the extension's answer to a command, or what its cells do",
    reserved=True)
SUSPEND: "Route[EmptyRequest, LeaseStatus]" = Route("suspend", "POST", _L + "/suspend", EmptyRequest, "status.LeaseStatus", LEASE,
    "save GPU state to host memory", audited="suspend",
    waits_s=MAX_WAIT_S, withdraws=True)
RESUME: "Route[ResumeRequest, LeaseStatus]" = Route("resume", "POST", _L + "/resume", ResumeRequest, "status.LeaseStatus", LEASE,
    "bring saved state back", audited="resume",
    waits_s=MAX_WAIT_S, withdraws=True)
EXPECT = Route("expect", "POST", _L + "/expect", ExpectRequest, Done, LEASE, "announce that a cell will run soon")
PIN: "Route[PinRequest, LeaseStatus]" = Route("pin", "POST", _L + "/pin", PinRequest, "status.LeaseStatus", LEASE,
    "keep the lease resident for a while", audited="pin")
UNPIN: "Route[EmptyRequest, LeaseStatus]" = Route("unpin", "POST", _L + "/unpin", EmptyRequest, "status.LeaseStatus", LEASE,
    "end the pin", audited="unpin")
NOTE: "Route[NoteRequest, LeaseStatus]" = Route("note", "POST", _L + "/note", NoteRequest, "status.LeaseStatus", LEASE,
    "the user's note, in printable characters; empty to remove it", audited="note")
RESIZE: "Route[ResizeRequest, LeaseStatus]" = Route("resize", "POST", _L + "/resize", ResizeRequest, "status.LeaseStatus", LEASE,
    "resize the lease", audited="resize", withdraws=True)
MOVE: "Route[MoveRequest, LeaseStatus]" = Route("move", "POST", _L + "/move", MoveRequest, "status.LeaseStatus", ADMIN,
    "move the kernel to another device", audited="move", waits_s=MAX_WAIT_S,
    withdraws=True)
EVICT = Route("evict", "POST", _L + "/evict", EvictRequest, Done, ADMIN, "end the kernel and lose its variables", audited="evict",
    waits_s=MAX_WAIT_S)
END = Route("end", "POST", _L + "/end", EmptyRequest, Done, LEASE, "end the processes that the kernel left", audited="end",
    waits_s=_END_S)
STORY: "Route[EmptyRequest, Story]" = Route("story", "GET", _L + "/story", EmptyRequest, "status.Story", LEASE,
    "what happened, and why")
HISTORY: "Route[EmptyRequest, History]" = Route("history", "GET", _L + "/history", EmptyRequest, "status.History", LEASE,
    "memory and state over time")
COST: "Route[EmptyRequest, Cost]" = Route("cost", "GET", _L + "/cost", EmptyRequest, "accounts.Cost", LEASE,
    "costs of the lease and its user")
OTHERS = Route("others", "GET", _L + "/others", OthersQuery, OthersUse, LEASE, "recent use of the device by others")

DRAIN: "Route[DrainRequest, DeviceStatus]" = Route("drain", "POST", _D + "/drain", DrainRequest, "status.DeviceStatus", ADMIN,
    "empty a device", audited="drain")
UNDRAIN: "Route[EmptyRequest, DeviceStatus]" = Route("undrain", "POST", _D + "/undrain", EmptyRequest, "status.DeviceStatus", ADMIN,
    "use a drained device again", audited="undrain")

OFFERS: "Route[OfferRequest, Offers]" = Route("offers", "POST", "/v1/offers", "seats.OfferRequest", "seats.Offers", ADMIN,
    "what each pool offers one user of the hub")
SEATS: "Route[EmptyRequest, SeatList]" = Route("seats", "GET", "/v1/seats", EmptyRequest, "seats.SeatList", ADMIN, "all seats")
TAKE_SEAT: "Route[SeatRequest, SeatProgress]" = Route("take", "POST", "/v1/seats", "seats.SeatRequest", "seats.SeatProgress", ADMIN,
    "wait for a seat; the last line is `granted` or `refused`", audited="seat.give", lines=True)
CONFIRM_SEAT: "Route[EmptyRequest, SeatStatus]" = Route("confirm", "POST", _S + "/confirm", EmptyRequest, "status.SeatStatus", ADMIN,
    "keep the seat, because the hub has saved it")
RELEASE_SEAT = Route("unseat", "DELETE", _S, EmptyRequest, Done, ADMIN, "end the seat; no effect if it has ended", audited="seat.end")
POOLS: "Route[EmptyRequest, PoolList]" = Route("pools", "GET", "/v1/pools", EmptyRequest, "seats.PoolList", ADMIN,
    "the current keys of every pool")
CHANGE_POOL: "Route[PoolChange, PoolKeys]" = Route("change", "POST", "/v1/pools/{pool}", "seats.PoolChange", "seats.PoolKeys", ADMIN,
    "change keys until the broker restarts", audited="pool.change")
# fmt: on

ROUTES: tuple[Route[Any, Any], ...] = tuple(value for value in list(globals().values()) if isinstance(value, Route))
