"""What users and administrators do to kernels and devices while a process dies: see `tests.support.dying`."""

import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.errors import (
    BrokerUnavailableError,
    ConflictError,
    FractionalGPUError,
    InternalBrokerError,
)
from fractional_gpu.protocol.messages import (
    DrainRequest,
    EvictRequest,
    MoveRequest,
    PinRequest,
    ProgressKind,
    ResizeRequest,
)
from fractional_gpu.protocol.seats import OfferRequest, SeatRequest
from fractional_gpu.protocol.status import DeviceStatus, LeaseStatus
from tests.support.dying import Life, Story
from tests.support.faults import lose_device, return_device
from tests.support.stories import CHECK
from tests.support.victims import (
    await_held,
    brokers,
    is_held,
    is_settled,
    kill_all,
    runs_without_gpu,
    stopped_or_traced,
)
from tests.support.world import DEADLINE_S, until

__all__ = ["SteeredStory"]

T = TypeVar("T")
_ATTEMPTS = 3


class SteeredStory(Story):
    """One kernel and two devices: pins, sizes, moves, emptied and lost devices, seats, a pool's keys, and a restarted broker."""

    simulate = "2x128MiB"
    config = (
        'policy = {"retry_refused": "200ms", "unattached_ttl": "10s", "may_move": True, "min_residency": 0, "preempt": "priorities"}\n'
        'c.GPUBroker.pools = {"default": policy}\n'
    )

    def plot(self) -> None:
        (life,) = self.cast(1)
        life.live()
        self.sizes_and_pins(life)
        self.moves(life)
        self._waits_in_vain(life)
        self._truth_is_looked_for(life)
        self._other_device_is_lost(life)
        self._seats_and_pools()
        self._starts_anew(life)
        self._is_evicted(life)
        life.end()

    def steer(self, act: Callable[[SeatClient], T], *, ended: bool = False) -> T | None:
        """Do it; if a process died, do it again, which must succeed. `ended`: a lease that has ended then is fine, too.

        On a full disk what takes an operation (a suspend, a move, another size) is refused, and asked for again at rest.
        """
        self.go_on()
        for attempt in range(_ATTEMPTS):
            try:
                with SeatClient(self.world.socket) as client:
                    return act(client)
            except (BrokerUnavailableError, InternalBrokerError):
                if self.file.exists():  # no process has died
                    raise
                self.start_broker()
            except FractionalGPUError as error:
                if ended and attempt:
                    return None
                if not isinstance(error, ConflictError) or not self.disk_is_full or self.file.exists():
                    raise
                until(lambda: all(map(is_settled, self.world.status().leases)), f"all are at rest after: {error}")
        raise AssertionError("it failed again and again, though only one was to die, or one write to fail")

    def must(self, act: Callable[[SeatClient], T]) -> T:
        """The same for a call with an answer."""
        answer = self.steer(act)
        assert answer is not None
        return answer

    @staticmethod
    def _lease(client: SeatClient, life: Life) -> LeaseStatus:
        (lease,) = [one for one in client.status().leases if one.kernel_id == life.kernel_id]
        return lease

    @staticmethod
    def _left(lease: LeaseStatus, device: str) -> bool:
        return lease.state == "suspended" or lease.lease.device_id != device

    def _on(self, life: Life) -> str:
        return self.must(lambda client: self._lease(client, life)).lease.device_id or ""

    def _await(self, ask: Callable[[SeatClient], bool], what: str) -> None:
        until(lambda: self.steer(ask), what)

    def sizes_and_pins(self, life: Life) -> None:
        lease_id = self.must(lambda client: self._lease(client, life)).lease_id
        self.must(lambda client: client.pin(lease_id, PinRequest(duration_ms=60_000)))
        self.must(lambda client: client.unpin(lease_id))
        self.must(lambda client: client.pin(lease_id, PinRequest(duration_ms=1)))  # its end wakes the broker
        for fraction_milli in (1000, 750):
            size = ResizeRequest(fraction_milli=fraction_milli)
            self.must(partial(SeatClient.resize, lease_id=lease_id, request=size))
            life.live()
        self.must(lambda client: client.suspend(lease_id))
        self.must(lambda client: client.resume(lease_id))
        self.must(lambda client: client.story(lease_id))
        self.must(lambda client: client.history(lease_id))
        life.live()

    def moves(self, life: Life) -> None:
        lease_id = self.must(lambda client: self._lease(client, life)).lease_id
        self.must(lambda client: client.move(lease_id, MoveRequest()))
        life.live()
        home = self._on(life)
        self._drain(home)
        self._await(lambda client: self._left(self._lease(client, life), home), "the kernel leaves the device")
        life.live()
        assert self._on(life) != home, "it is on a device that is being emptied"
        self.must(lambda client: client.undrain(home))

    def _drain(self, device: str) -> DeviceStatus:
        return self.must(lambda client: client.drain(device, DrainRequest(evict_busy=True)))

    def _waits_in_vain(self, life: Life) -> None:
        """With both devices empty a cell waits, until it is interrupted."""
        devices = [device.device_id for device in self.must(lambda client: client.status()).devices]
        for device in devices:
            self._drain(device)
        self._await(lambda client: self._lease(client, life).state == "suspended", "the kernel leaves its device")

        def wait_and_give_up() -> None:
            cell = life.line().send(CHECK)
            # The cell's own line, not a place in the queue: a kernel whose last "idle" came late has one before the cell waits. An
            # interrupt that meets ipykernel just then is caught and logged there, and the cell gets no reply.
            life.line().await_message("display_data", cell)
            life.line().interrupt()
            assert "KeyboardInterrupt" in life.line().wait(cell).error

        wait_and_give_up()
        for device in devices:
            self.must(partial(SeatClient.undrain, device=device))
        life.live()

    def _truth_is_looked_for(self, life: Life) -> None:
        """The broker dies during a checkpoint that its worker continues: the next one knows the state only after that."""
        with stopped_or_traced(self.world, "checkpoint", "hang"):
            cell = self._suspended_until_held(life)
            kill_all(brokers(self.world))
            self.start_broker()
            self._await(lambda client: self._lease(client, life).state == "quarantined", "its state is unknown")
        life.line().wait(cell)
        life.live()

    def _suspended_until_held(self, life: Life) -> str:
        """Request the suspend from a cell, and wait until it is held up; repeat it if the broker died before. Returns the cell."""
        armed = self.file.exists()
        cell = life.line().send("%gpu suspend")
        until(
            lambda: is_held(self.world) or (armed and not self.file.exists()), "the suspend begins, or the broker dies"
        )
        if not is_held(self.world):
            life.line().wait(cell)
            cell = life.line().send("%gpu suspend")
            await_held(self.world)
        return cell

    def _other_device_is_lost(self, life: Life) -> None:
        home = self._on(life)
        (other,) = [one.device_id for one in self.must(lambda client: client.status()).devices if one.device_id != home]
        for change, lost in ((lose_device, True), (return_device, False)):
            change(self.world.simulated_folder, other)
            self._await(partial(_is_lost, device_id=other, lost=lost), "the broker sees what became of the device")
        life.live()

    def _is_evicted(self, life: Life) -> None:
        """Its bytes are lost, as requested; Jupyter restarts it, with another lease."""
        old = self.must(lambda client: self._lease(client, life)).lease_id
        self.steer(lambda client: client.evict(old, EvictRequest(confirm=True)), ended=True)
        self._await(
            lambda client: (
                any(
                    one.kernel_id == life.kernel_id and one.lease_id != old and one.pid is not None
                    for one in client.status().leases
                )
                or (self.disk_is_full and runs_without_gpu(self.world, life.kernel_id))
            ),
            "Jupyter starts the kernel again",
        )
        life.begin_anew()
        life.live()

    def _seats_and_pools(self) -> None:
        self.must(lambda client: client.offers(OfferRequest(owner="ada")))
        seat_id = self.must(self._taken)
        self.steer(lambda client: client.confirm_seat(seat_id))
        self.must(lambda client: client.seats())
        self.steer(lambda client: client.release_seat(seat_id))
        self._await(lambda client: not client.seats().seats, "no seat is left")
        self.must(lambda client: client.pools())
        self.must(lambda client: client.change_pool("default", {"max_priority": 3}))

    @staticmethod
    def _taken(client: SeatClient) -> str:
        *_, last = client.take_seat(SeatRequest(owner="ada", pool="default", fraction_milli=250))
        assert last.kind == ProgressKind.GRANTED, last.sentence
        return last.seat_id

    def _starts_anew(self, life: Life) -> None:
        """An orderly stop, and a start that finds the kernel."""
        self.must(lambda client: next(iter(client.events())))
        self.must(_scraped)
        pid = self.world.broker_pid()
        if pid is not None:  # else it has died just now
            self.world.end(pid, signal.SIGTERM)
        self.start_broker()
        assert not self.must(lambda client: client.seats()).seats, "a seat that was given back is there again"
        life.live()
        life.restart()
        life.live()


def _scraped(client: SeatClient) -> bytes:
    """Read the broker's metrics as Prometheus does. Raises BrokerUnavailableError if it hangs up before the end."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(DEADLINE_S)
        try:
            line.connect(client.socket_path)
            line.sendall(b"GET /v1/metrics HTTP/1.0\r\nHost: broker\r\n\r\n")
            page = b"".join(iter(lambda: line.recv(1 << 16), b""))
        except OSError as error:
            raise BrokerUnavailableError(f"the broker hung up: {error}") from error
    if b"\njupyter_gpu_" not in page:
        raise BrokerUnavailableError(f"the broker hung up after {len(page)} bytes")
    return page


def _is_lost(client: SeatClient, *, device_id: str, lost: bool) -> bool:
    return lost in [one.lost for one in client.status().devices if one.device_id == device_id]
