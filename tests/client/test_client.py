"""The client speaks the lease API, keeps its connections honest, and turns every failure into one of our errors."""

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from types import FrameType

import pytest
from msgspec import to_builtins

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.codec import decode_reply
from fractional_gpu.protocol.errors import (
    BadRequestError,
    BrokerUnavailableError,
    ConflictError,
    ForbiddenError,
    FractionalGPUError,
    InternalBrokerError,
    NoRoomError,
    NotFoundError,
    RequestTooLargeError,
    UnauthorizedError,
)
from fractional_gpu.protocol.messages import (
    AcquireRequest,
    AttachRequest,
    GateAnswer,
    GateCommand,
    GateHello,
    LeaseRequest,
    Progress,
)
from fractional_gpu.protocol.status import HostStatus, StoryLine, UsagePoint
from tests.support.fake_broker import DEADLINE_S, FakeBroker
from tests.support.fake_broker import Call as FakeCall

REQUEST = LeaseRequest(fraction_milli=250, kernel_id="k", label="notebook.ipynb")
HELLO = GateHello(version="1", open=True, busy=False)
ATTACH = AttachRequest(pid=1, start_time=2, boot_id="b", connection={"key": "k", "shell_port": 1})


def test_a_lease_lives_from_creation_to_release(broker: FakeBroker, client: BrokerClient) -> None:
    reply = client.create_lease(REQUEST)
    assert (reply.lease_id, reply.token, reply.environment) == ("lease-1", "token-1", {"CUDA_VISIBLE_DEVICES": ""})
    assert client.attach("lease-1", ATTACH).state == "unarmed"
    assert client.lease("lease-1").pid == 1
    assert client.suspend("lease-1").state == "suspended"
    assert client.resume("lease-1").state == "resident"
    client.answer("lease-1", GateAnswer(number=3, word="closed"))
    client.detach("lease-1")
    client.release("lease-1")
    client.release("lease-1")
    assert broker.leases["lease-1"].state == "ended"
    assert broker.bodies("create")[0]["label"] == "notebook.ipynb"
    assert broker.bodies("attach")[0]["connection"] == {"key": "k", "shell_port": 1}
    assert broker.bodies("answer")[0] == {"number": 3, "word": "closed", "detail": ""}


def test_a_lease_tells_its_story_and_its_neighbours(broker: FakeBroker, client: BrokerClient) -> None:
    client.create_lease(REQUEST)
    broker.extra = {
        "lines": [{"at_ms": 1, "reason": "admitted", "sentence": "It came.", "mood": "good"}],
        "points": [{"at_ms": 1, "state": "resident", "used_mib": 2, "saved_mib": 0}],
        "neighbours": [{"fraction_milli": 125, "reserved_mib": 64, "state": "resident", "busy": False}],
    }
    assert client.story("lease-1").lines == [StoryLine(at_ms=1, reason="admitted", sentence="It came.")]
    history = client.history("lease-1")
    assert history.cap_mib == 2048
    assert history.points == [UsagePoint(at_ms=1, state="resident", used_mib=2, saved_mib=0)]
    (neighbour,) = client.lease("lease-1").neighbours
    assert (neighbour.fraction_milli, neighbour.label) == (125, "")


def test_events_are_whole_statuses_though_the_broker_sends_changes(broker: FakeBroker, client: BrokerClient) -> None:
    for _ in range(3):
        client.create_lease(REQUEST)
    whole = broker.answer(FakeCall("status", "", {}, 0), "")
    first, second, third = whole["leases"]
    then = {**whole, "host_saved_mib": 7, "leases": [first, {**third, "saved_mib": 7}]}
    change = {
        "changed": {**then, "devices": [], "leases": then["leases"][1:]},
        "ended": [second["lease"]["spec"]["lease_id"]],
    }
    broker.gate_bytes = [json.dumps(line).encode() + b"\n" for line in (whole, change)]
    events = client.events()
    before, after = next(events), next(events)
    assert before == decode_reply(whole, HostStatus)
    assert after == decode_reply(then, HostStatus)


@pytest.mark.parametrize(
    "line", [{"changed": {}, "ended": []}, {"ended": []}, {"changed": None, "ended": None}], ids=str
)
def test_a_change_that_cannot_be_applied_is_an_error(broker: FakeBroker, client: BrokerClient, line: object) -> None:
    broker.gate_bytes = [json.dumps(line).encode() + b"\n"]
    with pytest.raises(InternalBrokerError):
        next(client.events())


def test_text_that_utf8_cannot_carry_is_refused_before_it_is_sent(broker: FakeBroker, client: BrokerClient) -> None:
    with pytest.raises(BadRequestError, match=r"'notebook\\udc80', which is not valid text"):
        client.create_lease(LeaseRequest(fraction_milli=250, label="notebook\udc80"))
    assert broker.calls == []


def test_lease_ids_are_escaped(broker: FakeBroker, client: BrokerClient) -> None:
    with pytest.raises(NotFoundError):
        client.lease("../status?x=\r\nHost: evil")
    assert [call.lease_id for call in broker.calls] == ["..%2Fstatus%3Fx%3D%0D%0AHost%3A%20evil"]


@pytest.mark.parametrize(
    "error",
    [
        BadRequestError("no", reason="bad-fraction"),
        UnauthorizedError("no"),
        ForbiddenError("no"),
        NotFoundError("no"),
        ConflictError("no", reason="busy"),
        RequestTooLargeError("no"),
        NoRoomError("asked for 1, there is none"),
        InternalBrokerError("no"),
    ],
    ids=lambda error: error.code,
)
def test_an_error_comes_back_as_it_was_raised(
    broker: FakeBroker, client: BrokerClient, error: FractionalGPUError
) -> None:
    broker.fail["ping"] = error
    with pytest.raises(type(error)) as caught:
        client.ping()
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert caught.value.reason == error.reason


def test_a_lease_is_never_asked_for_twice(broker: FakeBroker, client: BrokerClient) -> None:
    broker.hang_up["create"] = 1
    with pytest.raises(BrokerUnavailableError, match="closed the connection"):
        client.create_lease(REQUEST)
    assert broker.routes() == ["create"]


def test_a_broker_that_does_not_answer_is_given_up_and_not_asked_again(broker: FakeBroker) -> None:
    broker.held["status"] = threading.Event()
    with BrokerClient(broker.path, timeout_s=0.05) as client:
        client.ping()
        with pytest.raises(BrokerUnavailableError, match=r"did not answer within 0\.05 s"):
            client.status()
        assert broker.routes() == ["ping", "status"]
        broker.held["status"].set()
        assert client.ping().protocol == 1


def test_an_interrupt_leaves_no_half_used_connection_behind(broker: FakeBroker, client: BrokerClient) -> None:
    client.ping()
    broker.held["status"] = threading.Event()
    over = threading.Event()
    raised: list[int] = []

    def raise_once(number: int, _frame: FrameType | None) -> None:
        if not raised:
            raised.append(number)
            raise KeyboardInterrupt

    def interrupt() -> None:
        broker.wait_for(lambda: "status" in broker.routes())
        # Again and again: one that comes just before the client waits is seen only when another ends the wait.
        while not over.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, raise_once)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            client.status()
    finally:
        over.set()
        interrupter.join()
        signal.signal(signal.SIGINT, before)
    broker.held["status"].set()
    assert client.ping().pid == os.getpid()  # and not the status that was asked for before


def test_a_forked_child_leaves_its_parents_connection_alone(broker: FakeBroker, client: BrokerClient) -> None:
    client.create_lease(REQUEST)
    broker.held["resume"] = threading.Event()
    thread, raised = resuming(client)
    broker.wait_for(lambda: "resume" in broker.routes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads; the child uses none
        child = os.fork()
    if child == 0:
        try:
            client.close()
            client.ping()
        except BaseException:  # noqa: BLE001 - a forked test process must not continue
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    broker.held["resume"].set()
    assert ended(thread)
    assert raised == []


def test_acquire_tells_how_the_wait_goes_and_ends_with_the_grant(broker: FakeBroker, client: BrokerClient) -> None:
    client.create_lease(REQUEST)
    waiting = Progress(kind="waiting", reason="queue", sentence="2 kernels before you", position=3)
    granted = Progress(kind="granted", environment={"CUDA_VISIBLE_DEVICES": "GPU-1"}, device_id="GPU-1")
    broker.progress = [waiting, granted]
    assert list(client.acquire("lease-1", AcquireRequest(wait_ms=7_000))) == [waiting, granted]
    assert broker.bodies("acquire") == [{"wait_ms": 7_000, "hold": False, "watch": False}]


def test_acquire_that_is_cut_is_no_grant(broker: FakeBroker, client: BrokerClient) -> None:
    client.create_lease(REQUEST)
    broker.progress = [Progress(kind="waiting", position=1)]
    stream = client.acquire("lease-1", AcquireRequest())
    next(stream)
    broker.drop_connections()
    with pytest.raises(BrokerUnavailableError):
        next(stream)


def test_a_refused_stream_raises_the_error(broker: FakeBroker, client: BrokerClient) -> None:
    client.create_lease(REQUEST)
    broker.fail["acquire"] = ConflictError("the lease has no process", reason="unattached")
    with pytest.raises(ConflictError, match="no process"):
        next(client.acquire("lease-1", AcquireRequest()))


def test_gate_commands_come_whole_however_they_are_cut(broker: FakeBroker, client: BrokerClient) -> None:
    client.create_lease(REQUEST)
    broker.gate_bytes = [b'{"verb":""}\n{"verb":"clo', b'se","number":7,', b'"news":1}\n{"verb":"open","number":8}\n']
    stream = client.gate("lease-1", HELLO)
    assert [next(stream), next(stream), next(stream)] == [
        GateCommand(),
        GateCommand(verb="close", number=7),
        GateCommand(verb="open", number=8),
    ]
    assert broker.bodies("gate") == [to_builtins(HELLO)]


def test_close_wakes_a_thread_that_waits_at_the_gate(broker: FakeBroker, client: BrokerClient) -> None:
    client.create_lease(REQUEST)
    broker.gate_bytes = [b'{"verb":""}\n']
    reached, outcome = threading.Event(), list[BaseException]()

    def listen() -> None:
        try:
            for _ in client.gate("lease-1", HELLO):
                reached.set()
        except BrokerUnavailableError as error:
            outcome.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    assert reached.wait(DEADLINE_S)
    client.close()
    thread.join(DEADLINE_S)
    assert len(outcome) == 1
    broker.wait_for(lambda: broker.hung_up == ["gate"])


def resuming(client: BrokerClient) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that resumes, and what it raised."""
    raised = list[BaseException]()

    def resume() -> None:
        try:
            client.resume("lease-1")
        except FractionalGPUError as error:
            raised.append(error)

    thread = threading.Thread(target=resume)
    thread.start()
    return thread, raised


def ended(thread: threading.Thread) -> bool:
    thread.join(DEADLINE_S)
    return not thread.is_alive()


def test_close_gives_up_a_call_and_it_is_not_made_again(broker: FakeBroker, client: BrokerClient) -> None:
    client.create_lease(REQUEST)
    broker.held["resume"] = threading.Event()
    thread, raised = resuming(client)
    broker.wait_for(lambda: "resume" in broker.routes())
    client.close()
    assert ended(thread)
    assert [type(error) for error in raised] == [BrokerUnavailableError]
    broker.held["resume"].set()
    assert client.ping().pid == os.getpid(), "it may be used again"
    assert broker.routes().count("resume") == 1


def test_importing_the_client_loads_only_msgspec_that_a_kernel_has_not() -> None:
    code = (
        "import sys, ipykernel.kernelapp; before = set(sys.modules); import fractional_gpu.client.client; "
        "print([m for m in sorted(set(sys.modules) - before) if m.split('.')[0] not in ('fractional_gpu', 'msgspec')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
