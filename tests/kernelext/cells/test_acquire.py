"""One ticket for all waiting cells, withdrawn with the last one; brokers that break."""

import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, cast

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import (
    BrokerUnavailableError,
    FractionalGPUError,
    InternalBrokerError,
    TooManyRequestsError,
)
from fractional_gpu.protocol.messages import Progress
from fractional_gpu_kernel.cells import acquire
from fractional_gpu_kernel.cells.acquire import MAX_FRUITLESS, Acquirer, RefusedError, Waiter
from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.settings import Settings
from tests.kernelext.scripted_broker import LEASE, TOKEN, ScriptedBroker
from tests.support.world import until


class Side:
    def __init__(self, settings: Settings) -> None:
        self.bound: list[Mapping[str, str]] = []
        self.gate = Gate(self.bound.append)
        self.acquirer = Acquirer(settings, self.gate)

    def join(self) -> Waiter:
        waiter: Waiter = SimpleQueue()
        self.acquirer.join(waiter)
        return waiter


@pytest.fixture
def side(folder: Path, broker: ScriptedBroker) -> Iterator[Side]:
    (folder / "token").write_text(TOKEN + "\n")
    yield Side(Settings(LEASE, broker.path, str(folder / "token")))
    acquirers = [thread for thread in threading.enumerate() if thread.name == "gpu-acquire"]
    broker.stop()
    for thread in acquirers:
        thread.join(60)
        assert not thread.is_alive()


def text(waiter: Waiter) -> str:
    told = waiter.get(timeout=60)
    return told.sentence if isinstance(told, Progress) else str(told)


def test_all_who_wait_share_one_ticket_and_a_latecomer_is_told_the_last_news(
    side: Side, broker: ScriptedBroker
) -> None:
    first = side.join()
    broker.stream("acquire").waiting("lease-2 runs")
    assert text(first) == "lease-2 runs"
    second = side.join()
    assert text(second) == "lease-2 runs"
    side.acquirer.leave(first)
    broker.stream("acquire").refused("no")
    assert text(second) == "no"
    assert first.empty()
    assert broker.count("acquire") == 1


def test_the_last_to_leave_hangs_up_and_the_next_asks_again(side: Side, broker: ScriptedBroker) -> None:
    waiter = side.join()
    broker.stream("acquire").waiting("wait")
    text(waiter)
    side.acquirer.leave(waiter)
    side.acquirer.leave(waiter)
    broker.wait_for(lambda: broker.hung_up == ["acquire"])
    again = side.join()
    broker.stream("acquire", 2).refused("no")
    assert text(again) == "no"


def test_a_grant_binds_the_device_and_opens_the_gate(side: Side, broker: ScriptedBroker) -> None:
    opened = threading.Event()
    side.gate.start_waiting(opened.set)
    side.join()
    broker.stream("acquire").granted(CUDA_VISIBLE_DEVICES="GPU-1")
    assert opened.wait(60)
    assert side.bound == [{"CUDA_VISIBLE_DEVICES": "GPU-1"}]


def test_a_preemption_right_after_the_grant_is_no_refusal(
    side: Side, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = side.gate.open

    def open_and_preempt(*arguments: Any) -> bool:  # noqa: ANN401 - the gate's own
        opened = really_open(*arguments)
        side.gate.preempt()
        return opened

    monkeypatch.setattr(side.gate, "open", open_and_preempt)
    waiter = side.join()
    broker.stream("acquire").granted()
    until(lambda: not any(thread.name == "gpu-acquire" for thread in threading.enumerate()), "the thread ends")
    assert waiter.empty()


def test_a_broker_that_breaks_again_and_again_without_a_word_is_an_answer(
    side: Side, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquire, "LONGEST_PAUSE_S", 0.0)
    broker.hang_up["acquire"] = 100
    waiter = side.join()
    told = [text(waiter) for _ in range(MAX_FRUITLESS)]
    assert told[:-1] == [acquire.REVIVING] * (MAX_FRUITLESS - 1)
    assert "closed the connection" in told[-1]
    assert broker.routes().count("acquire") == MAX_FRUITLESS


def test_a_broker_that_had_a_word_for_us_is_asked_again_for_ever(
    side: Side, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquire, "LONGEST_PAUSE_S", 0.0)
    waiter = side.join()
    for number in range(1, 2 * MAX_FRUITLESS):
        stream = broker.stream("acquire", number)
        stream.waiting("wait")
        assert text(waiter) == "wait"
        stream.break_off()
        assert text(waiter) == acquire.REVIVING
    broker.stream("acquire", 2 * MAX_FRUITLESS).refused("no")
    assert text(waiter) == "no"


class Hasty(Settings):
    """Settings whose clients repeat no call."""

    def connect(self, timeout_s: float = 0.5) -> BrokerClient:
        return super().connect(min(timeout_s, 0.5))


@pytest.mark.parametrize(
    "error",
    [InternalBrokerError("the broker failed"), TooManyRequestsError("too many connections")],
    ids=["internal", "too-many"],
)
def test_a_broker_that_cannot_answer_for_a_while_is_asked_again(
    folder: Path, side: Side, broker: ScriptedBroker, error: FractionalGPUError
) -> None:
    side.acquirer = Acquirer(Hasty(LEASE, broker.path, str(folder / "token")), side.gate)
    broker.fail["acquire"] = error
    waiter = side.join()
    assert text(waiter) == str(error)
    del broker.fail["acquire"]
    opened = threading.Event()
    side.gate.start_waiting(opened.set)
    broker.stream("acquire").granted()
    assert opened.wait(60)


def test_a_broker_that_takes_no_call_while_it_is_revived_is_asked_again(
    side: Side, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def revive(_settings: Settings) -> NoReturn:
        raise TooManyRequestsError("too many connections")

    monkeypatch.setattr(Settings, "revive", revive)
    broker.hang_up["acquire"] = 1
    waiter = side.join()
    assert text(waiter) == acquire.REVIVING
    broker.stream("acquire").refused("no")
    assert text(waiter) == "no"


def test_a_broker_that_fails_again_and_again_is_an_answer(
    side: Side, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquire, "LONGEST_PAUSE_S", 0.0)
    broker.fail["acquire"] = InternalBrokerError("the broker failed")
    waiter = side.join()
    assert isinstance([waiter.get(timeout=60) for _ in range(MAX_FRUITLESS)][-1], RefusedError)
    assert broker.routes().count("acquire") == MAX_FRUITLESS


class Deaf:
    """Settings of a process that cannot call the broker."""

    lease_id = LEASE

    def __init__(self, error: Exception) -> None:
        self._error = error

    def connect(self) -> NoReturn:
        raise self._error

    def revive(self) -> NoReturn:
        raise AssertionError("a broker that this process cannot reach is not started again")


DEAF = [
    TypeError("'NoneType' object is not callable"),
    OSError(24, "Too many open files"),
    BrokerUnavailableError("no socket can be had", reason="no-descriptor"),
    BrokerUnavailableError("the socket may not be opened by this user", reason="no-access"),
]


@pytest.mark.parametrize("error", DEAF, ids=repr)
def test_a_process_that_cannot_ask_waits_until_the_broker_opens_the_gate(error: Exception) -> None:
    gate = Gate(lambda _: None)
    acquirer = Acquirer(cast("Settings", Deaf(error)), gate, lambda: True)
    waiter: Waiter = SimpleQueue()
    opened = threading.Event()
    gate.start_waiting(opened.set)
    acquirer.join(waiter)
    told = waiter.get(timeout=60)
    assert isinstance(told, Progress)
    assert told.reason == "cannot-ask"
    assert str(error) in told.sentence
    assert gate.open({})
    assert opened.wait(60)
    acquirer.leave(waiter)


@pytest.mark.parametrize("error", DEAF, ids=repr)
def test_a_process_that_can_neither_ask_nor_hear_refuses_the_cell_and_says_what_to_do(error: Exception) -> None:
    acquirer = Acquirer(cast("Settings", Deaf(error)), Gate(lambda _: None), lambda: False)
    waiter: Waiter = SimpleQueue()
    acquirer.join(waiter)
    told = text(waiter)
    assert "Its GPU memory is kept" in told
    assert "%%cpu" in told
    assert "restart" not in told


def test_a_wait_restores_the_signal_handler_and_leaves_no_waiter(side: Side, broker: ScriptedBroker) -> None:
    before = signal.getsignal(signal.SIGINT)
    answer = threading.Thread(target=lambda: broker.stream("acquire").refused("no"))
    answer.start()
    with pytest.raises(RefusedError, match="no"):
        side.acquirer.wait_for_gpu(None, "cell")
    answer.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert side.gate.close() == "closed"


def test_an_interrupt_while_the_main_thread_waits_withdraws_the_ticket(side: Side, broker: ScriptedBroker) -> None:
    def interrupt() -> None:
        broker.stream("acquire")
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        side.acquirer.wait_for_gpu(None, "cell")
    thread.join()
    broker.wait_for(lambda: broker.hung_up == ["acquire"])
    assert side.gate.close() == "closed"


def test_an_interrupt_that_comes_with_the_grant_ends_the_wait_too(
    side: Side, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    stop_waiting = side.gate.stop_waiting

    def interrupted(*args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - as the gate's
        # The wait has read its last note, and the handler is still the wait's.
        signal.raise_signal(signal.SIGINT)
        return stop_waiting(*args, **kwargs)

    monkeypatch.setattr(side.gate, "stop_waiting", interrupted)
    grant = threading.Thread(target=lambda: broker.stream("acquire").granted())
    grant.start()
    with pytest.raises(KeyboardInterrupt):
        side.acquirer.wait_for_gpu(None, "cell")
    grant.join()
    assert signal.getsignal(signal.SIGINT) is before
    side.gate.leave("cell")
    assert side.gate.close() == "closed"


def test_a_wait_outside_the_main_thread_uses_no_signals(side: Side, broker: ScriptedBroker) -> None:
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=side.acquirer.wait_for_gpu, args=(None, "cell"))
    thread.start()
    broker.stream("acquire")
    assert signal.getsignal(signal.SIGINT) is before
    broker.stream("acquire").granted()
    thread.join(60)
    assert side.gate.is_running


@pytest.mark.parametrize("missing", ["JUPYTER_GPU_LEASE", "JUPYTER_GPU_SOCKET", "JUPYTER_GPU_TOKEN_FILE"])
def test_settings_need_all_three_variables(missing: str) -> None:
    complete = {"JUPYTER_GPU_LEASE": "l", "JUPYTER_GPU_SOCKET": "/s", "JUPYTER_GPU_TOKEN_FILE": "/t"}
    assert Settings.from_environment(complete) == Settings("l", "/s", "/t")
    assert Settings.from_environment({**complete, missing: ""}) is None
