"""Only its user and administrators learn the name and the pid of a program that uses a device without a lease."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pwd import getpwnam

import msgspec
import pytest

from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.services.status import StatusStream, Viewer, host_status
from fractional_gpu.core.events import DeviceSeen
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.protocol.messages import AcquireRequest
from fractional_gpu.protocol.status import HostStatus, Stranger, describe_strangers
from tests.broker.live import BECOME_NOBODY, LiveBroker, live_broker, started_for

pytestmark = pytest.mark.promise("own-leases")

ROOT, ADA, BOB, NOBODY = os.getuid(), 54_001, 54_002, getpwnam("nobody").pw_uid
PROGRAMS = [
    Stranger(pid=4711, user="ada", used_mib=512, command="train", uid=ADA),
    Stranger(pid=4712, user="bob", used_mib=256, command="mine", uid=BOB),
    Stranger(pid=4713, user="unknown", used_mib=128),  # the broker may not read it
]
HIDDEN = ["a program of ada", "a program of bob", "a program of unknown"]
NAMED = ["train (process 4711 of ada)", "mine (process 4712 of bob)", "a program of unknown"]
VIEWERS = {
    "an administrator": (Viewer(caller=ROOT), NAMED),
    "ada, an administrator": (Viewer(caller=ADA), ["train (your process 4711)", *NAMED[1:]]),
    "ada": (Viewer(uid=ADA, caller=ADA), ["train (your process 4711)", *HIDDEN[1:]]),
    "another user": (Viewer(uid=NOBODY, caller=NOBODY), HIDDEN),
    "a seat, as containers share uids": (Viewer(uid=ADA, seat="s", owner="ada", caller=ADA), HIDDEN),
    "a seat in a container of root's": (Viewer(seat="s", owner="ada", caller=ROOT), HIDDEN),
}
ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect(sys.argv[1])
    line.sendall(b"GET /v1/status HTTP/1.0\\r\\nHost: b\\r\\n\\r\\n")
    sys.stdout.write(line.makefile().read().partition("\\n\\n")[2])
"""


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker() as live:
        (device,) = live.broker.devices
        live.broker.enforcement.strangers[device] = PROGRAMS
        yield live


def test_the_table_has_a_row_for_each_kind_of_viewer() -> None:
    """If this fails, a viewer has a new property: say above what it makes of a program's name."""
    assert set(Viewer.__dataclass_fields__) == {"uid", "seat", "owner", "caller"}


@pytest.mark.parametrize("who", VIEWERS)
def test_a_viewer_gets_the_names_that_the_table_says(live: LiveBroker, who: str) -> None:
    viewer, names = VIEWERS[who]

    async def answered() -> HostStatus:
        return host_status(live.broker, live.socket, viewer)

    async def followed() -> HostStatus:
        async with aclosing(StatusStream(live.broker, live.socket).follow(viewer)) as news:
            async for status in news:
                if isinstance(status, HostStatus):
                    return status
        raise AssertionError("the stream ended too early")

    for status in (live.on_loop(answered), live.on_loop(followed)):
        seen = status.devices[0].strangers
        assert [one.name for one in seen] == names
        assert [one.used_mib for one in seen] == [512, 256, 128], "sizes are for everyone"
        text = msgspec.json.encode(seen).decode()
        for one, name in zip(PROGRAMS, names, strict=True):
            if name in HIDDEN and one.command:
                assert not any(secret in text for secret in (str(one.pid), str(one.uid), one.command))


def test_another_user_at_the_socket_gets_no_names_but_of_their_own_programs(live: LiveBroker) -> None:
    (device,) = live.broker.devices
    live.broker.enforcement.strangers[device] = [PROGRAMS[0], replace_uid(PROGRAMS[1], NOBODY)]
    argv = [sys.executable, "-S", "-c", BECOME_NOBODY + ASK, live.socket]
    status = json.loads(subprocess.run(argv, capture_output=True, check=True, text=True, cwd="/").stdout)
    assert [(one["pid"], one["command"]) for one in status["devices"][0]["strangers"]] == [(0, ""), (4712, "mine")]
    everything = live.call("GET", "/v1/status").body["devices"][0]["strangers"]
    assert [one["pid"] for one in everything] == [4711, 4712], "an administrator gets them"


def replace_uid(program: Stranger, uid: int) -> Stranger:
    return msgspec.structs.replace(program, uid=uid)


def waits(live: LiveBroker, *, seat: bool) -> str:
    """Let a cell wait for memory that strangers use; return what it is told."""
    (device,) = live.broker.devices
    lease = live.lease(fraction_milli=1000, gated=True)
    spec = DeviceSpec(device_id=device, name="Simulated GPU", memory_mib=1024)

    async def occupied() -> None:
        live.broker.dispatch(DeviceSeen(at_ms=now_ms(), device=spec, stranger_mib=896))
        if seat:
            books = live.broker.arbiter._books
            held = books.leases[lease.lease_id]
            held.spec = replace(held.spec, uid=None, seat="s")

    with started_for(lease.lease_id) as process:
        assert live.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token).status == 200
        live.on_loop(occupied)
        body = msgspec.to_builtins(AcquireRequest())
        told = live.call("POST", f"/v1/leases/{lease.lease_id}/acquire", body, token=lease.token).body
    assert told["reason"] == "wait.stranger", told
    sentence: str = told["sentence"]
    return sentence


@pytest.mark.parametrize("seat", [False, True])
def test_a_waiting_cell_names_the_programs_as_its_user_may_see_them(live: LiveBroker, seat: bool) -> None:
    (device,) = live.broker.devices
    live.broker.enforcement.strangers[device] = [replace_uid(PROGRAMS[0], ROOT), *PROGRAMS[1:]]
    mine = "a program of ada" if seat else "train (your process 4711)"
    assert waits(live, seat=seat).endswith(
        f" is free on the roomiest device; {mine} holds 512 MiB, a program of bob holds 256 MiB, "
        "a program of unknown holds 128 MiB"
    )


def test_a_waiting_cell_says_so_if_no_program_is_known(live: LiveBroker) -> None:
    (device,) = live.broker.devices
    live.broker.enforcement.strangers[device] = []
    assert waits(live, seat=False).endswith("; processes without a lease use the rest")


def test_only_the_largest_programs_are_named() -> None:
    assert describe_strangers([]) == ""
    assert describe_strangers([Stranger(user="ada", used_mib=0)]) == ""
    many = [Stranger(user=user, used_mib=9216) for user in "abcde"]
    assert describe_strangers(many) == ", ".join(f"a program of {user} holds 9 GiB" for user in "abc") + " and 2 more"
