"""The broker knows whether a kernel is busy, and assumes so when it cannot know."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.broker import cost
from fractional_gpu.broker.cost import Account
from fractional_gpu.broker.kernels import iopub
from fractional_gpu.broker.kernels.connection import connection_from_json
from fractional_gpu.broker.kernels.iopub import USES, IOPubWatch
from fractional_gpu.protocol.limits import COST_BYTE_S
from tests.broker.kernels.kernel_line import DEADLINE_S, KernelLine, Watched

pytestmark = pytest.mark.promise("race-iopub")


@pytest.fixture
async def line() -> AsyncIterator[KernelLine]:
    line = KernelLine()
    yield line
    line.close()


@pytest.fixture
async def watched(line: KernelLine) -> AsyncIterator[Watched]:
    async with Watched(line) as watched:
        yield watched


async def test_a_fresh_watch_counts_as_busy_until_the_kernel_has_answered(line: KernelLine, watched: Watched) -> None:
    assert await line.subscribed() == b"kernel."
    probe = await line.asked()
    assert watched.watch.busy
    assert not watched.watch.executing
    await line.say("idle", {"msg_id": "somebody's", "msg_type": "execute_request"})
    await watched.has_heard_all()
    assert watched.watch.busy, "an idle of another message says nothing about the main shell"
    await line.answer(probe)
    await watched.until(lambda: not watched.watch.busy)


async def test_a_kernel_that_is_not_ipykernel_is_heard_whatever_its_topics(line: KernelLine) -> None:
    async with Watched(line, ipykernel=False) as watched:
        assert await line.subscribed() == b""
        await line.answer(await line.asked())
        await watched.until(lambda: not watched.watch.busy)


async def test_an_answer_that_a_late_subscription_missed_is_asked_for_again(
    line: KernelLine, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iopub, "_PROBE_PATIENCE_S", 0.02)
    await line.subscribed()
    missed = await line.asked()
    again = await line.asked()
    assert again["msg_id"] != missed["msg_id"]
    assert watched.watch.busy
    await line.answer(again)
    await watched.until(lambda: not watched.watch.busy)


async def test_what_only_a_person_at_work_sends_is_a_sign_and_no_cell(line: KernelLine, watched: Watched) -> None:
    await watched.settle()
    for kind in ("complete_request", "inspect_request", "debug_request", "comm_msg", "comm_open", "execute_request"):
        request = await line.busy(kind, kind)
        await watched.until(lambda: watched.watch.executing)
        assert watched.watch.runs_cell == (kind == "execute_request")
        await line.say("idle", request)
        await watched.until(lambda: not watched.watch.executing)
        assert not watched.watch.runs_cell
    await line.say("idle", {"msg_id": "not heard to begin", "msg_type": "complete_request"})
    await watched.has_heard_all()
    assert watched.signs == ["completion", "inspection", "widget"]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the watch, started after this, wait for the answer to its first question."""
    monkeypatch.setattr(iopub, "_PROBE_PATIENCE_S", DEADLINE_S * 2)


@pytest.mark.usefixtures("patient")
async def test_a_busy_kernel_is_not_flooded_with_questions_and_its_first_late_answer_counts(
    line: KernelLine, watched: Watched
) -> None:
    await line.subscribed()
    probe = await line.asked()
    for number in range(200):  # what a late subscriber sees of a running cell and its neighbours
        await line.say("idle", {"msg_id": f"{number}", "msg_type": "kernel_info_request"})
    await watched.has_heard_all()
    assert not await line.shell.poll(0), "every message heard made the watch ask again"
    await line.answer(probe)
    await watched.until(lambda: not watched.watch.busy)


@pytest.mark.parametrize("use", sorted(USES))
async def test_what_may_run_code_or_touch_a_tensor_is_use(line: KernelLine, watched: Watched, use: str) -> None:
    await watched.settle()
    request = await line.busy("m", use)
    await watched.until(lambda: watched.watch.executing)
    assert watched.watch.busy
    await line.say("idle", request)
    await watched.until(lambda: not watched.watch.busy)


async def test_questions_about_the_kernel_are_no_use(line: KernelLine, watched: Watched) -> None:
    await watched.settle()
    before = watched.changes
    for kind in ("kernel_info_request", "comm_info_request", "history_request", "usage_request"):
        await line.busy(kind, kind)
    await watched.has_heard_all()
    assert not watched.watch.busy
    assert watched.changes == before + 2  # from the marker itself


async def test_overlapping_subshells_are_busy_until_the_last_one_is_done(line: KernelLine, watched: Watched) -> None:
    await watched.settle()
    first = await line.busy("first")
    second = await line.busy("second", subshell_id="s1")
    await line.say("idle", first)
    await watched.has_heard_all()
    assert watched.watch.executing
    await line.say("idle", second)
    await watched.until(lambda: not watched.watch.busy)


async def test_a_lost_idle_is_found_out_by_asking_that_shell(
    line: KernelLine, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await line.subscribed()
    monkeypatch.setattr(iopub, "_SILENCE_S", 0.05)
    await line.answer(await line.asked())
    await watched.until(lambda: not watched.watch.busy)
    await line.busy("its idle is lost")
    await watched.until(lambda: watched.watch.executing)
    probe = await line.asked()
    assert "subshell_id" not in probe
    assert watched.watch.executing, "asking is no answer"
    await line.answer(probe)
    await watched.until(lambda: not watched.watch.busy)


async def test_the_main_shell_does_not_answer_for_a_subshell(
    line: KernelLine, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await line.subscribed()
    monkeypatch.setattr(iopub, "_SILENCE_S", 0.05)
    await line.answer(await line.asked())
    await watched.until(lambda: not watched.watch.busy)
    await line.busy("a training loop that says nothing for hours", subshell_id="s1")
    await line.busy("its idle is lost")
    probes = {probe.get("subshell_id"): probe for probe in (await line.asked(), await line.asked())}
    await line.answer(probes[None])
    await watched.has_heard_all()
    assert watched.watch.executing, "the subshell's cell was forgotten"
    await line.answer(probes["s1"])
    await watched.until(lambda: not watched.watch.busy)


async def test_a_message_with_a_wrong_signature_teaches_nothing(line: KernelLine, watched: Watched) -> None:
    await line.subscribed()
    probe = await line.asked()
    for key in ("a forged key", ""):
        await line.say("busy", {"msg_id": "forged", "msg_type": "execute_request"}, key=key)
        await line.say("idle", probe, key=key)
    await watched.has_heard_all()
    assert watched.watch.busy, "a forged idle was believed"
    assert not watched.watch.executing, "a forged busy was believed"


async def test_a_restarted_kernel_is_uncertain_and_its_old_cells_are_forgotten(
    line: KernelLine, watched: Watched
) -> None:
    await watched.settle()
    await line.busy("of the old incarnation")
    await watched.until(lambda: watched.watch.executing)
    await line.say("starting", {})
    await watched.until(lambda: not watched.watch.executing)
    assert watched.watch.busy
    await line.answer(await line.asked())
    await watched.until(lambda: not watched.watch.busy)


async def test_a_broken_connection_brings_the_doubt_back(line: KernelLine, watched: Watched) -> None:
    await watched.settle()
    line.break_line()
    await watched.until(lambda: watched.watch.busy)
    assert not watched.watch.executing
    line.mend_line()
    await line.subscribed()
    probe = await line.asked()
    while watched.watch.busy:  # the first answer may have come before the new subscription
        await line.answer(probe)
        await watched.has_heard_all()
    assert not watched.watch.busy


async def test_a_connection_that_breaks_again_and_again_is_made_ever_more_rarely(
    line: KernelLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    enough, sleep = asyncio.Event(), asyncio.sleep

    async def note(delay: float) -> None:
        if delay:
            pauses.append(delay)
        if len(pauses) == 10:
            enough.set()
        await sleep(0)

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    monkeypatch.setattr(asyncio, "sleep", note)
    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    line.iopub_port = server.sockets[0].getsockname()[1]
    async with server, Watched(line), asyncio.timeout(DEADLINE_S):
        await enough.wait()
    assert pauses[:10] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]


async def test_more_busy_messages_than_can_be_remembered_are_doubt(
    line: KernelLine, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iopub, "_MOST_BUSY", 3)
    await watched.settle()
    for number in range(4):
        await line.busy(f"{number}")
    await line.busy("x" * 100_000)
    await watched.has_heard_all()
    assert watched.watch.busy
    assert not watched.watch.executing
    await line.answer(await line.asked())
    await watched.until(lambda: not watched.watch.busy)


async def test_a_kernel_that_never_stops_sending_leaves_others_a_turn(
    line: KernelLine, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await watched.settle()
    turns, at = 0, list[int]()
    take = watched.watch._take

    def taken(frames: list[bytes]) -> None:
        at.append(turns)
        take(frames)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(watched.watch, "_take", taken)
    task = asyncio.create_task(others())
    for number in range(500):
        await line.say("idle", {"msg_id": f"{number}", "msg_type": "execute_request"})
    await watched.has_heard_all()
    task.cancel()
    assert len(at) >= 500
    assert len(set(at)) == len(at), "messages were handled without a turn for anything else"


async def test_a_message_that_is_too_long_breaks_the_line_and_the_kernel_is_heard_again(
    line: KernelLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iopub, "_LONGEST_FRAME", 10_000)
    monkeypatch.setattr(iopub, "_REJOIN_S", 0.01)
    async with Watched(line) as watched:
        await watched.settle()
        assert await line.subscribed() == b"kernel.x.status"
        assert await line.iopub.recv() == b"\0kernel."
        await line.busy("x" * 10_000)
        await watched.until(lambda: watched.watch.busy)
        assert not watched.watch.executing
        assert await line.iopub.recv() == b"\0kernel.x.status", "the line was not broken"
        assert await line.subscribed() == b"kernel."
        await line.answer(await line.asked())
        await watched.until(lambda: not watched.watch.busy)


async def test_once_the_topic_of_its_status_is_known_output_stays_in_the_kernel(
    line: KernelLine, watched: Watched
) -> None:
    await watched.settle()
    assert await line.subscribed() == b"kernel.x.status"
    assert await line.iopub.recv() == b"\0kernel.", "and to nothing else"
    received: list[list[bytes]] = []
    take = watched.watch._take
    watched.watch._take = lambda frames: received.append(frames) or take(frames)  # type: ignore[method-assign, func-returns-value]
    await line.iopub.send_multipart([b"kernel.x.display_data", b"<IDS|MSG>", b"", *[b"x" * 10_000_000] * 4])
    await watched.has_heard_all()
    assert {frames[0] for frames in received} == {b"kernel.x.status"}
    assert not watched.watch.busy


async def test_while_the_account_is_overdrawn_nothing_is_read_and_the_kernel_counts_as_busy(
    line: KernelLine, watched: Watched
) -> None:
    await watched.settle()
    watched.account.charge(10.0)
    await line.say("idle", {"msg_id": "the next message", "msg_type": "execute_request"})
    await watched.until(lambda: watched.watch.busy)
    watched.watch.taken.clear()
    await line.busy("unread")
    assert not watched.watch.executing
    assert not watched.watch.taken.is_set()
    watched.account.charge(-20.0)
    watched.account._wake()  # its timer was set for the debt
    await line.say("idle", {"msg_id": "unread", "msg_type": "execute_request"})
    await line.answer(await line.asked())
    await watched.until(lambda: not watched.watch.busy)


async def test_what_a_kernel_sends_is_charged_by_message_and_by_byte(
    line: KernelLine, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await watched.settle()
    account = watched.account
    monkeypatch.setattr(cost, "COST_SHARE", 0.0)  # no time is earned meanwhile
    costs = []
    for padding in ("", "x" * (iopub._LONGEST_STATUS // 2)):
        before_s = account._left
        await line.say("idle", {"msg_id": "m", "msg_type": "execute_request", "padding": padding})
        await watched.has_heard_all()
        costs.append(before_s - account._left)
    assert costs[0] > 0
    assert costs[1] - costs[0] > iopub._LONGEST_STATUS / 2 * COST_BYTE_S / 2


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_an_encrypted_kernel_is_heard_on_either_loopback(host: str) -> None:
    line = KernelLine(host, zmq.curve_keypair())
    try:
        async with Watched(line) as watched:
            assert watched.watch.busy, "nothing was heard yet"
            await watched.settle()
            assert not watched.watch.busy
    finally:
        line.close()


# -- connections -------------------------------------------------------------------------------------------------------------

GOOD = {"transport": "tcp", "ip": "127.0.0.1", "iopub_port": 5001, "shell_port": 5002, "key": "k"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"transport": "udp"}, ["transport is 'udp'", "expected tcp or ipc"]),
        ({"ip": "10.0.0.1"}, ["ip is '10.0.0.1'", "loopback address such as 127.0.0.1", "c.KernelManager.ip"]),
        ({"ip": "127.0.0.1.evil.org"}, ["evil.org", "loopback"]),
        ({"ip": "127.1"}, ["'127.1'", "loopback"]),
        ({"ip": 2130706433}, ["2130706433", "loopback"]),
        ({"ip": ["::1"]}, ["['::1']", "loopback"]),
        ({"transport": "ipc", "ip": "kernel-ipc"}, ["'kernel-ipc'", "absolute path of at most 100 bytes"]),
        ({"transport": "ipc", "ip": "/" + "x" * 200}, ["/xxx", "...", "absolute path of at most 100 bytes"]),
        ({"iopub_port": 0}, ["iopub_port is 0", "1 to 65535"]),
        ({"iopub_port": True}, ["iopub_port is True", "1 to 65535"]),
        ({"shell_port": "5002"}, ["shell_port is '5002'", "1 to 65535"]),
        ({"shell_port": None}, ["shell_port is None", "1 to 65535"]),
        ({"shell_port": 10**4000}, ["shell_port is 1000", "..."]),
        ({"key": 5}, ["key must be text", "signing key"]),
        ({"signature_scheme": "hmac-rot13"}, ["'hmac-rot13'", "hmac-sha256"]),
        ({"signature_scheme": "hmac-shake_128"}, ["'hmac-shake_128'", "hmac-sha256"]),
        ({"signature_scheme": "hmac-sha3_512"}, ["'hmac-sha3_512'", "hmac-sha256, hmac-sha512"]),
        ({"signature_scheme": {"x": "y" * 500}}, ["...", "hmac-sha256"]),
        ({"curve_publickey": "short", "curve_secretkey": "short"}, ["curve_publickey and curve_secretkey", "40 Z85"]),
        ({"curve_publickey": "#" * 40, "curve_secretkey": "#" * 40}, ["40 Z85"]),
        ({"curve_publickey": "0" * 40}, ["40 Z85"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_connection_that_cannot_be_used_is_refused_with_what_is_allowed(
    change: dict[str, object], says: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"^connection field") as caught:
        connection_from_json({**GOOD, **change})
    assert all(part in str(caught.value) for part in says), caught.value
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
NEARLY = {
    "transport": st.sampled_from(["tcp", "ipc"]) | JSON,
    "ip": st.sampled_from(["127.0.0.1", "localhost", "::1", "/x"]) | st.ip_addresses().map(str) | JSON,
    "iopub_port": st.integers(-1, 70_000) | JSON,
    "shell_port": st.integers(-1, 70_000) | JSON,
    "key": st.text() | JSON,
    "signature_scheme": st.sampled_from(["hmac-sha256", "hmac-md5", "hmac-blake2b"]) | JSON,
    "curve_publickey": st.none() | st.text("0a#", min_size=40, max_size=40) | JSON,
    "curve_secretkey": st.none() | st.text("0a#", min_size=40, max_size=40) | JSON,
}


async def test_any_contents_are_a_connection_that_can_be_watched_or_a_value_error() -> None:
    context = zmq.asyncio.Context()

    @given(st.fixed_dictionaries({}, optional=NEARLY))
    def check_anything(info: dict[str, object]) -> None:
        try:
            connection = connection_from_json(info)
        except ValueError as error:
            assert "connection field" in str(error)  # noqa: PT017 - only if it is one
        else:
            nothing = asyncio.Event()
            IOPubWatch(
                context,
                connection,
                Account("user x"),
                ipykernel=True,
                changed=nothing.set,
                signed=lambda _: nothing.set(),
            ).close()

    check_anything()
    context.destroy(linger=0)
