"""Model servers that hold memory which a kernel waits for are asked to release it, each in its way, and only where it is allowed."""

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.services import yielders as yielders_module
from fractional_gpu.broker.services.yielders import Yielder
from fractional_gpu.config.model_servers import SERVERS, parse_yielders
from fractional_gpu.core.events import Attached, DeviceSeen, LeaseReleased, LeaseRequested, Unwanted, Wanted
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState
from fractional_gpu.host.process import owner_and_name
from fractional_gpu.protocol.status import Stranger
from tests.broker.live import LiveBroker, live_broker
from tests.support.model_servers import Asked, StubServer, served
from tests.support.paths import ROOT
from tests.support.waiting import DEADLINE_S, until

pytestmark = pytest.mark.promise("model-servers")

OTHER = 54_321  # a uid that no user has
HELD_MIB = 900
UNLOAD = [("GET", "/api/ps", ""), ("POST", "/api/generate", '{"model": "llama3:latest", "keep_alive": 0}')]
SLEEP = [("GET", "/is_sleeping", ""), ("POST", "/sleep?level=1&mode=wait", "")]
WAKE = [("GET", "/is_sleeping", ""), ("POST", "/wake_up", "")]
FREE = [("POST", "/free", '{"unload_models": true, "free_memory": true}')]


@dataclass
class Desk:
    """A broker with one device that a stranger, this process, holds: servers in this process are that stranger's."""

    live: LiveBroker
    pid: int = field(default_factory=os.getpid)
    held_mib: int = 0
    looks: int = 0

    def __post_init__(self) -> None:
        (self.device_id,) = self.live.broker.devices
        self.hold(HELD_MIB)

    def hold(self, mib: int) -> None:
        """Make the stranger use this much; the broker knows with its next look at the devices."""
        self.held_mib = mib
        self.on_loop(self._see)

    def on_loop(self, act: Callable[[], object]) -> None:
        async def run() -> None:
            act()

        self.live.on_loop(run)

    def _see(self) -> None:
        broker = self.live.broker
        info = broker.devices[self.device_id]
        spec = DeviceSpec(device_id=self.device_id, name=info.name, memory_mib=info.memory_mib)
        uid, command = owner_and_name(self.pid)
        stranger = Stranger(pid=self.pid, user="me", used_mib=self.held_mib, uid=uid, command=command)
        there = [stranger] if self.held_mib else []
        broker.enforcement.strangers[self.device_id] = there
        broker.dispatch(DeviceSeen(at_ms=now_ms(), device=spec, stranger_mib=self.held_mib))

    async def refresh(self) -> None:
        self.looks += 1
        self._see()

    def kernel(self, name: str, uid: int | None = None, *, seat: str = "", wants: bool = True) -> Kernel:
        """Start a kernel that wants a quarter of the device."""
        broker = self.live.broker
        spec = LeaseSpec(
            lease_id=name, pool="default", owner="me", fraction_milli=250, reserve_mib=256, gated=True, seat=seat
        )
        broker.kernels[name] = Kernel(
            lease_id=name, uid=os.getuid() if uid is None else uid, token_sha256="", gated=True
        )

        def begin() -> None:
            broker.dispatch(LeaseRequested(at_ms=now_ms(), spec=spec, needs_reservation=False))
            broker.dispatch(Attached(at_ms=now_ms(), lease_id=name, gated=True))
            if wants:
                broker.dispatch(Wanted(at_ms=now_ms(), lease_id=name))

        self.on_loop(begin)
        return broker.kernels[name]

    def state(self, kernel: Kernel) -> LeaseState:
        view = self.live.broker.arbiter.lease(kernel.lease_id)
        assert view is not None
        return view.state

    def told(self, name: str) -> list[str]:
        """Return the lines about servers in the kernel's story."""
        self.live.on_loop(self.live.broker.writer.flushed)
        story = self.live.broker.writer.ledger.story(name)
        return [line.sentence for line in story if line.reason == "wait.asked-server"]

    def said(self, kernel: Kernel) -> str:
        return "; ".join(said for one in self.live.broker.asked_servers if (said := one(kernel)))

    def yielder(self, entry: str, *, everyone: bool = False) -> Yielder:
        (server,) = parse_yielders([entry])
        return Yielder(self.live.broker, server, everyone=everyone, refresh=self.refresh)

    def frees(self, loaded: bool) -> None:
        self.held_mib = HELD_MIB if loaded else 0


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy that is not for servers of this machine
    with live_broker() as live:
        yield Desk(live)


def stub(desk: Desk, kind: str = "ollama", fault: str = "") -> AbstractContextManager[StubServer]:
    return served(StubServer(kind, fault, changed=desk.frees))


def look(desk: Desk, server: StubServer, *, everyone: bool = False) -> Yielder:
    asks = desk.yielder(f"{server.kind}=http://localhost:{server.port}", everyone=everyone)
    desk.live.on_loop(asks.look)
    return asks


@pytest.mark.parametrize(
    ("kind", "requests", "sentence"),
    [
        ("ollama", UNLOAD, "asked Ollama to unload its models"),
        ("comfyui", FREE, "asked ComfyUI to unload its models"),
        ("llama-swap", [("POST", "/api/models/unload", "")], "asked llama-swap to unload its models"),
        ("vllm", SLEEP, "asked vLLM to sleep"),
    ],
)
def test_each_server_is_asked_in_its_way_and_the_kernel_begins_at_once(
    desk: Desk,
    kind: str,
    requests: list[Asked],
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    kernel = desk.kernel("a")
    assert desk.state(kernel) is LeaseState.NO_CONTEXT
    with stub(desk, kind) as server:
        look(desk, server)
        assert server.asked == requests
    assert (desk.state(kernel), desk.looks) == (LeaseState.RESIDENT, 1)
    assert desk.told("a") == [sentence]
    assert desk.said(kernel) == "", "it waits no longer"
    assert f"{sentence} (it loses {SERVERS[kind].loses})" in caplog.messages


def test_the_line_of_the_waiting_cell_and_the_status_say_what_was_asked(desk: Desk) -> None:
    desk.kernel("a")
    with stub(desk, fault="lie") as server:
        look(desk, server)
    (lease,) = desk.live.call("GET", "/v1/status").body["leases"]
    assert lease["sentence"].endswith("; a program of me holds 900 MiB; asked Ollama to unload its models")


def test_a_server_that_lies_is_asked_again_after_a_while_and_the_kernel_waits(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = desk.kernel("a")
    with stub(desk, fault="lie") as server:
        asks = look(desk, server)
        assert desk.looks == yielders_module._LOOKS
        desk.live.on_loop(asks.look)
        assert server.asked == UNLOAD, "not so soon"
        monkeypatch.setattr(yielders_module, "_AGAIN_S", 0.0)
        asks._next_s = 0.0
        desk.live.on_loop(asks.look)
        assert server.asked == [*UNLOAD, UNLOAD[0]]
    assert desk.said(kernel) == "asked Ollama to unload its models, but it says that nothing is loaded"
    assert desk.state(kernel) is LeaseState.NO_CONTEXT


def test_twenty_waiting_cells_ask_once(desk: Desk) -> None:
    kernels = [desk.kernel(str(number)) for number in range(20)]
    with stub(desk, fault="lie") as server:
        asks = look(desk, server)
        for _ in range(20):
            desk.live.on_loop(asks.look)
        assert server.asked == UNLOAD
    assert set(map(desk.said, kernels)) == {"asked Ollama to unload its models"}


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("hang", "it did not respond within 0.3 s"),
        ("drip", "it did not respond within 0.3 s"),
        ("huge", "it is not responding (HTTPStreamClosedError)"),
        ("continue", "it is not responding (HTTPStreamClosedError)"),
        ("headers", "it is not responding (UnsatisfiableReadError)"),
        ("garbage", "it is not responding (HTTPStreamClosedError)"),
        ("redirect", "it responded with status 302"),
        ("refuse", "it responded with status 403"),
        ("nonsense", "it does not report what is loaded"),
        ("deep", "it does not report what is loaded"),
    ],
)
def test_a_server_that_misbehaves_costs_little_and_nothing_else(
    desk: Desk, fault: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yielders_module, "_TIMEOUT_S", 0.3)
    kernel = desk.kernel("a")
    with stub(desk, fault=fault) as server:
        began_s = time.monotonic()
        look(desk, server)
        assert time.monotonic() - began_s < 2
        assert server.asked == UNLOAD[:1], "and a redirect is not followed"
    assert desk.said(kernel) == f"asked Ollama to unload its models, but {outcome}"
    assert desk.live.is_alive()


def test_all_that_servers_may_take_is_two_seconds() -> None:
    assert yielders_module._TIMEOUT_S == 2


def test_a_port_that_refuses_is_not_asked(desk: Desk) -> None:
    kernel = desk.kernel("a")
    with stub(desk) as server:
        pass
    look(desk, server)
    assert (server.asked, desk.said(kernel), desk.looks) == ([], "", 0)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])  # noqa: S104 - a server may listen on all addresses
def test_a_server_is_found_wherever_it_listens(desk: Desk, address: str) -> None:
    desk.kernel("a")
    with served(StubServer("ollama", changed=desk.frees), address) as server:
        desk.live.on_loop(desk.yielder(f"ollama=http://127.0.0.1:{server.port}/").look)
        assert server.asked == UNLOAD


def test_another_user_who_listens_on_the_other_loopback_address_keeps_no_server_from_being_asked(desk: Desk) -> None:
    desk.kernel("a")
    with stub(desk) as server, socket.create_server(("::1", server.port), family=socket.AF_INET6) as other:
        os.fchown(other.fileno(), OTHER, -1)
        look(desk, server)
        assert server.asked == UNLOAD


def test_another_users_server_is_asked_only_if_the_administrator_says_so(desk: Desk) -> None:
    kernel = desk.kernel("a", OTHER)
    with stub(desk) as server:
        look(desk, server)
        assert (server.asked, desk.said(kernel)) == ([], "")
        look(desk, server, everyone=True)
        assert server.asked == UNLOAD
    assert desk.told("a") == ["asked Ollama to unload its models"]


def test_a_seats_kernel_owns_no_server_as_containers_share_uids(desk: Desk) -> None:
    desk.kernel("a", seat="one")
    with stub(desk) as server:
        look(desk, server)
        assert server.asked == []
        look(desk, server, everyone=True)
        assert server.asked == UNLOAD


def test_a_server_without_a_process_on_the_device_is_not_asked(desk: Desk) -> None:
    desk.pid = 1
    desk.hold(HELD_MIB)
    desk.kernel("a")
    with stub(desk) as server:
        look(desk, server)
        assert server.asked == []


@contextmanager
def process(path: str | Path) -> Iterator[int]:
    """A process with this program's name, which ends with the block."""
    with subprocess.Popen([path], stdin=subprocess.PIPE) as started:
        until(lambda: owner_and_name(started.pid)[1] == Path(path).name or None, "it has its name")
        yield started.pid


def test_a_child_of_the_server_counts_as_the_server(desk: Desk) -> None:
    with stub(desk) as server, process("/bin/cat") as child:
        desk.pid = child
        desk.hold(HELD_MIB)
        desk.kernel("a")
        look(desk, server)
        assert server.asked == UNLOAD


@pytest.mark.parametrize(("name", "asked"), [("ollama", UNLOAD), ("python", [])])
def test_a_process_of_the_servers_user_counts_by_its_name_if_the_listener_is_not_to_be_seen(
    desk: Desk, name: str, asked: list[Asked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yielders_module, "holds_open", lambda *_: False)  # as for other users' processes without root
    program = shutil.copy("/bin/cat", tmp_path / name)
    with stub(desk) as server, process(program) as pid:
        desk.pid = pid
        desk.hold(HELD_MIB)
        desk.kernel("a")
        look(desk, server)
        assert server.asked == asked


def test_a_server_is_asked_for_a_kernel_that_other_kernels_keep_out_too(desk: Desk) -> None:
    desk.hold(200)
    assert {desk.state(desk.kernel(name)) for name in "abc"} == {LeaseState.RESIDENT}
    with stub(desk) as server:
        look(desk, server)
        assert server.asked == [], "no kernel waits"
        desk.kernel("d")
        look(desk, server)
        assert server.asked == UNLOAD


def test_vllm_wakes_when_no_kernel_waits_and_what_it_released_fits(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielders_module, "_AGAIN_S", 0.0)
    monkeypatch.setattr(yielders_module, "_PERIOD_S", 0.0)
    desk.hold(1000)
    kernel = desk.kernel("a")

    def change(loaded: bool) -> None:
        desk.held_mib = 1000 if loaded else 100  # it keeps a context

    with served(StubServer("vllm", changed=change)) as server:
        asks = look(desk, server)
        assert server.asked == SLEEP
        assert desk.state(kernel) is LeaseState.RESIDENT
        desk.live.on_loop(asks.look)
        assert server.asked == SLEEP, "the kernel has its room"
        desk.on_loop(lambda: desk.live.broker.dispatch(LeaseReleased(at_ms=now_ms(), lease_id="a")))
        server.fault = "hang"
        monkeypatch.setattr(yielders_module, "_TIMEOUT_S", 0.1)
        desk.live.on_loop(asks.look)
        assert server.asked == [*SLEEP, WAKE[0]]
        server.fault = ""
        server.over.set()
        monkeypatch.setattr(yielders_module, "_TIMEOUT_S", 2.0)
        for _ in range(2):
            desk.live.on_loop(asks.look)
            assert server.asked == [*SLEEP, WAKE[0], *WAKE], "once"


def test_vllm_that_its_user_woke_or_put_to_sleep_is_left_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielders_module, "_AGAIN_S", 0.0)
    with stub(desk, "vllm") as server:
        server.loaded = False
        kernel = desk.kernel("a")
        asks = look(desk, server)
        assert desk.said(kernel) == "asked vLLM to sleep, but it says that nothing is loaded"
        desk.on_loop(lambda: desk.live.broker.dispatch(LeaseReleased(at_ms=now_ms(), lease_id="a")))
        desk.hold(0)
        desk.live.on_loop(asks.look)
        assert server.asked == SLEEP[:1]


def test_what_does_not_wait_for_strangers_asks_for_nothing(desk: Desk) -> None:
    kernel = desk.kernel("a")
    arbiter = desk.live.broker.arbiter
    assert arbiter.stranger_devices("a") == [desk.device_id]
    desk.on_loop(lambda: desk.live.broker.dispatch(Unwanted(at_ms=now_ms(), lease_id="a")))
    assert arbiter.stranger_devices("a") == []
    assert arbiter.stranger_devices("unknown") == []
    assert desk.said(kernel) == ""


def test_servers_on_other_addresses_and_unknown_ones_are_refused() -> None:
    ollama = SERVERS["ollama"]
    assert parse_yielders(["ollama", "ollama=http://localhost", "ollama=http://127.0.0.1:11434/"]) == (ollama,)
    assert parse_yielders(["ollama=http://127.0.0.1:1"]) == (replace(ollama, port=1),)
    for wrong in (
        "ollama", None, [1], ["llama"], ["ollama="], ["ollama=https://127.0.0.1"], ["ollama=http://10.0.0.1:11434"], ["ollama=http://[::1]:1"],
        ["ollama=http://127.0.0.1:65536"], ["ollama=http://127.0.0.1:0"], ["ollama=http://me@127.0.0.1"], ["ollama=http://127.0.0.1/x"],
        ["ollama=http://127.0.0.1:80@evil.example"], ["ollama=http://localhost.evil.example"], ["ollama\n"],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="'ollama', 'comfyui', 'llama-swap', 'vllm'; for a server"):
            parse_yielders(wrong)


def test_a_kernel_that_begins_to_wait_soon_after_is_told_too_and_all_servers_are_named(desk: Desk) -> None:
    desk.kernel("a")
    with stub(desk, fault="lie") as ollama, stub(desk, "comfyui", "lie") as comfyui:
        asks = [look(desk, one) for one in (ollama, comfyui)]
        later = desk.kernel("b")
        for one in asks:
            desk.live.on_loop(one.look)
        assert (ollama.asked, comfyui.asked) == (UNLOAD, FREE)
    sentences = ["asked Ollama to unload its models", "asked ComfyUI to unload its models"]
    assert desk.said(later) == "; ".join(sentences)
    assert desk.told("a") == sentences, "once"


def test_what_was_asked_is_told_until_the_server_has_released_most_of_it(desk: Desk) -> None:
    kernel = desk.kernel("a")
    desk.hold(1000)
    with stub(desk, fault="lie") as server:
        look(desk, server)
        for held_mib, sentence in ((850, "asked Ollama to unload its models"), (400, "")):
            desk.held_mib = held_mib
            desk.live.on_loop(desk.refresh)
            assert desk.said(kernel) == sentence
    assert server.asked == UNLOAD


def test_a_server_that_hangs_delays_no_other(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielders_module, "_TIMEOUT_S", DEADLINE_S)
    desk.kernel("a")
    both_asked = threading.Barrier(3)

    def meet(asked: Asked) -> None:
        if asked[0] == "GET":
            both_asked.wait(DEADLINE_S)

    servers = [StubServer("vllm", "hang"), StubServer("ollama")]
    for server in servers:
        server.told = meet
    with served(servers[0]) as vllm, served(servers[1]) as ollama:
        asks = [desk.yielder(f"{one.kind}=http://127.0.0.1:{one.port}") for one in (vllm, ollama)]

        async def run() -> None:
            tasks = [asyncio.create_task(one.run()) for one in asks]
            await asyncio.to_thread(both_asked.wait, DEADLINE_S)
            for task in tasks:
                task.cancel()

        desk.live.on_loop(run)


def test_the_page_says_of_each_server_where_it_listens_and_what_it_loses() -> None:
    page = (ROOT / "docs" / "one-card.md").read_text()
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    found = {name.strip(" `"): (port, loses.strip(" |")) for name, port, _, loses in rows}
    assert found == {name: (str(one.port), one.loses) for name, one in SERVERS.items()}
