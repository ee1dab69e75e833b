"""`jupyter gpu lease`: no claim outlives its end, its holder or its waiting client, and none ends early."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fractional_gpu.client.claims import take_claim
from fractional_gpu.client.seat import SEAT_FILE_VARIABLE, Seat, SeatClient, write_seat
from fractional_gpu.protocol.messages import LeaseRequest
from fractional_gpu.protocol.seats import SeatRequest
from fractional_gpu.protocol.status import DeviceStatus, LeaseStatus
from tests.support.runs import READER, Run
from tests.support.world import World, new_world, until

pytestmark = pytest.mark.promise("claims")

STRANGER = str(Path(__file__).parents[1] / "support" / "stranger.py")


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    """One world for this file's tests, with 1 GiB of device memory. Every test ends its claims."""
    with new_world() as world:
        world.configure(
            "c.GPUBroker.pools = {'default': {'idle_after': 0, 'min_residency': 0, 'pin_budget': 'unlimited'}}"
        )
        world.start_broker()
        yield world


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    for lease in shared.status().leases:
        assert shared.command("release", lease.lease_id).returncode == 0


def claim(world: World, *words: str, memory: str = "700MiB") -> dict[str, Any]:
    done = world.command("lease", "--memory", memory, "--json", *words)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return {**told, "lease_id": told["lease"]["lease"]["spec"]["lease_id"]}


def lease_of(world: World, told: dict[str, Any]) -> LeaseStatus:
    (lease,) = [one for one in world.status().leases if one.lease_id == told["lease_id"]]
    return lease


def is_over(world: World, told: dict[str, Any]) -> bool:
    return told["lease_id"] not in {one.lease_id for one in world.status().leases}


def device(world: World) -> DeviceStatus:
    with world.client() as client:
        return client.status(fresh=True).devices[0]


@contextmanager
def started(world: World, *words: str) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        words, env=world.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def waiting(world: World, *words: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    """A client that asks for more than is free."""
    return started(world, sys.executable, "-m", "fractional_gpu.commands.main", "lease", "--memory", "700MiB", *words)


def await_ticket(world: World) -> None:
    until(lambda: any(one.position for one in world.status().leases), "the second claim waits")


def test_a_claim_says_what_it_has_and_is_shown_until_its_release(world: World) -> None:
    told = claim(world, "--ttl", "10m", "--name", "sketch")
    lease = lease_of(world, told)
    assert (lease.kind, lease.state, lease.pid) == ("claim", "resident", None)
    assert (told["device"]["index"], lease.spec.reserve_mib, lease.spec.fraction_milli) == (0, 700, 750)
    assert 590_000 < told["ends_in_ms"] <= 600_000
    assert "sketch (claim)" in world.command("status").stdout
    refused = world.command("suspend", told["lease_id"])
    assert (refused.returncode, "it is a claim" in refused.stderr) == (1, True)
    assert world.command("release", told["lease_id"]).returncode == 0
    assert is_over(world, told)
    assert device(world).reserved_mib == 0


@pytest.mark.parametrize("broker_dies", [False, True])
def test_a_claim_ends_with_its_holder(world: World, *, broker_dies: bool) -> None:
    with started(world, "cat") as holder:
        told = claim(world, "--holder", str(holder.pid))
        assert lease_of(world, told).state == "resident"
        if broker_dies:
            world.kill_broker()
        World.end(holder.pid, signal.SIGKILL)
        if broker_dies:
            world.start_broker()
        until(lambda: is_over(world, told), "the claim ends")


def test_a_claim_outlives_its_broker_with_the_same_end(world: World) -> None:
    told = claim(world, "--ttl", "10m")
    before = lease_of(world, told)
    world.kill_broker()
    world.start_broker()
    after = lease_of(world, told)
    assert (after.state, after.lease.device_ids) == ("resident", before.lease.device_ids)
    # The broker's clock is the machine's, so the end is the same moment.
    assert abs(after.lease.pinned_until_ms - before.lease.pinned_until_ms) < 1000
    assert device(world).reserved_mib == 700


def test_a_claim_ends_when_its_time_is_over_and_a_renewal_moves_its_end(world: World) -> None:
    short, long = claim(world, "--ttl", "2s", memory="300MiB"), claim(world, "--ttl", "2s", memory="300MiB")
    renewed = world.command("pin", long["lease_id"], "10m")
    assert renewed.returncode == 0, renewed.stderr
    until(lambda: is_over(world, short), "the claim ends")
    assert 500_000 < lease_of(world, long).pinned_ms <= 600_000
    refused = world.command("pin", long["lease_id"], "2h")
    assert (refused.returncode, "allows at most 1 h" in refused.stderr) == (1, True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_client_that_ends_while_it_waits_leaves_nothing(world: World, number: signal.Signals) -> None:
    told = claim(world)
    with waiting(world) as client:
        await_ticket(world)
        client.send_signal(number)
        client.wait()
    until(lambda: len(world.status().leases) == 1, "the ticket is withdrawn")
    assert lease_of(world, told).state == "resident"


def test_a_wait_that_is_too_long_says_so_and_leaves_nothing(world: World) -> None:
    told = claim(world)
    done = world.command("lease", "--memory", "700MiB", "--wait", "0")
    assert (done.returncode, done.stdout) == (os.EX_TEMPFAIL, "")
    assert done.stderr.count("jupyter gpu: ") == 1
    assert "is claimed for" in done.stderr
    assert [one.lease_id for one in world.status().leases] == [told["lease_id"]]


def test_a_waiting_client_gets_its_claim_though_the_broker_was_killed(world: World) -> None:
    told = claim(world)
    with waiting(world, "--json") as client:
        await_ticket(world)
        world.kill_broker()
        until(lambda: world.broker_pid() is not None, "the client starts a broker")
        assert world.command("release", told["lease_id"]).returncode == 0
        printed, complaint = client.communicate(timeout=60)
    assert client.returncode == 0, complaint
    assert [one.lease_id for one in world.status().leases] == [
        json.loads(printed)["lease"]["lease"]["spec"]["lease_id"]
    ]


PROGRAM = """
import os
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(400 << 20)
print(os.getpid(), flush=True)
raise SystemExit(int(input()))
"""


def test_a_program_holds_its_claim_as_long_as_it_runs(world: World) -> None:
    words = [sys.executable, "-m", "fractional_gpu.commands.main", "lease", "--memory", "700MiB", "--"]
    with started(world, *words, sys.executable, "-c", PROGRAM) as one:
        assert one.stdout is not None
        assert int(one.stdout.readline()) == one.pid
        until(lambda: device(world).used_mib and world.status().leases[0].busy, "the claim is in use")
        (lease,) = world.status().leases
        assert (lease.state, lease.lease.used_mib >= 400, device(world).stranger_mib) == ("resident", True, 0)
        one.communicate("7", timeout=60)
        assert one.returncode == 7
    until(lambda: not world.status().leases, "the claim ends with its program")
    until(lambda: device(world).stranger_mib == 0, "what the program used is free again")
    missing = subprocess.run([*words, "no-such-program"], env=world.environment, capture_output=True, check=False)
    assert missing.returncode == 127
    assert world.status().leases == []


def test_a_program_of_the_same_user_counts_for_the_claim_up_to_its_size(world: World) -> None:
    told = claim(world, memory="300MiB")
    with started(world, sys.executable, "-P", STRANGER, str(world.simulated_folder), "0", "400") as program:
        assert program.stdout is not None
        assert program.stdout.readline().startswith("holding")
        until(lambda: lease_of(world, told).lease.used_mib >= 400, "it counts for the claim")
        shown = device(world)
        assert shown.strangers == []
        assert shown.stranger_mib == lease_of(world, told).lease.used_mib - 300
        used_mib = lease_of(world, told).lease.used_mib
        assert world.command("release", told["lease_id"]).returncode == 0
        assert world.status().devices[0].stranger_mib == used_mib, "at once: its room is given to nobody"
        until(lambda: [one.pid for one in device(world).strangers] == [program.pid], "it is a stranger")
    until(lambda: device(world).stranger_mib == 0, "it has ended")


def test_an_idle_program_makes_room_for_a_claim_and_comes_back_after_it(world: World) -> None:
    assert world.command("pool", "default", "idle_after=on-demand").returncode == 0
    with Run.python(world, "idle", READER) as run:
        told = claim(world)
        run.await_state("suspended")
        assert run.process.stdin is not None
        run.process.stdin.write("look\n")
        run.process.stdin.flush()
        await_ticket(world)
        assert lease_of(world, told).state == "resident"
        assert world.command("release", told["lease_id"]).returncode == 0
        assert run.line() == "intact\n"
        assert run.end()[0] == 0
        run.await_no_lease()


def test_a_python_program_can_claim(world: World) -> None:
    with patch.dict(os.environ, world.environment):
        lease, gpu, bound = take_claim(LeaseRequest(fraction_milli=250, ttl_ms=60_000))
    assert (lease.kind, lease.spec.reserve_mib, gpu.index) == ("claim", 256, 0)
    assert bound["JUPYTER_GPU_SIMULATED_DEVICE"] == gpu.device_id
    with world.client() as client:
        client.release(lease.lease_id)
        assert client.status().leases == []


def test_a_claim_in_a_hub_s_server_draws_on_its_seat_and_ends_with_it(world: World) -> None:
    file = world.folder / "seat.json"
    with SeatClient(world.socket) as hub:
        *_, seat = hub.take_seat(SeatRequest(owner="ada", pool="default", fraction_milli=500, server="lab"))
        write_seat(
            Seat(seat_id=seat.seat_id, token=seat.token, pool="default", fraction_milli=500, memory_mib=512), file
        )
        with patch.dict(world.environment, {SEAT_FILE_VARIABLE: str(file)}):
            told = claim(world, memory="400MiB")
            lease = lease_of(world, told)
            assert (lease.spec.owner, lease.spec.seat, lease.state) == ("ada", seat.seat_id, "resident")
            assert world.command("pin", told["lease_id"], "5m").returncode == 0
            refused = world.command("lease", "--memory", "200MiB", "--wait", "0")
            assert (refused.returncode, "this server has 1/2 GPU with 512 MiB" in refused.stderr) == (1, True)
        hub.release_seat(seat.seat_id)
        until(lambda: is_over(world, told), "the claim ends with its seat")
