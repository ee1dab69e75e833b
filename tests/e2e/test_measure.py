"""`jupyter gpu measure` in real processes on the simulated device, whose slowdown is known."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.benchmarks.measure_share import MEMORY, Visit, seated_world, visitor
from tests.support.stories import fill
from tests.support.world import DEADLINE_S, Server, World, new_world, until

pytestmark = pytest.mark.promise("measure")

QUICK = "c.GPUBroker.pools = {'default': {'idle_after': 'on-demand'}}"
WORKS = """
import sys
from fractional_gpu.gpu.simulated import cuda
from fractional_gpu_kernel.measure import tick
buffer = cuda.allocate(int(sys.argv[1]) << 20)
while True:
    cuda.launch(0.06, float(sys.argv[2]))
    tick()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    with new_world() as world:
        world.configure(QUICK)
        world.start_broker()
        yield world


def start(world: World, *words: str, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "fractional_gpu.commands.main", "measure", *words],
        env=environment or world.environment,
        cwd=world.notebooks,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def measure(world: World, *words: str) -> tuple[int, dict[str, Any], str]:
    with start(world, "--json", *words) as process:
        printed, complaint = process.communicate(timeout=240)
    return process.returncode, json.loads(printed) if printed else {}, complaint


def read_until(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    pytest.fail(f"it ended before it said {text!r}")


def measure_a_round(world: World, *words: str) -> tuple[dict[str, Any], str]:
    with start(world, "--json", *words) as process:
        read_until(process, "round 1,")
        process.send_signal(signal.SIGINT)
        printed, complaint = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, complaint
    found: dict[str, Any] = json.loads(printed)
    return found, complaint


def assert_nothing_left(world: World) -> None:
    until(lambda: not world.status().leases, "all leases end")


def test_tenants_on_one_of_two_devices_slow_down_as_it_does_and_a_share_without_the_memory_says_so() -> None:
    with new_world("2x1GiB") as world:
        world.configure(QUICK)
        world.start_broker()
        picture = world.folder / "tenants.svg"
        options = ("--fractions", "1/4,1/2,1", "--within", "150s", "--interval", "60%", "--picture", str(picture))
        status, found, complaint = measure(world, *options, "--", sys.executable, "-c", WORKS, "300", "1.0")
        assert status == 0, complaint
        alone, half, quarter = found["settings"]
        assert (alone["setting"]["tenants"], half["setting"]["tenants"], half["rounds"] >= 7) == (1, 2, True)
        assert 1.5 < half["slower"]["value"] < 2.6, "two that use the whole device take twice as long each"
        assert alone["memory_mib"] >= 300
        assert (alone["busy_percent"] or 0) > 30
        assert "exit status 1" in quarter["why_not"]
        assert "OutOfMemory" in quarter["why_not"]
        assert found["suffices_milli"] is None
        assert found["simulated"]
        assert "<svg" in picture.read_text(encoding="utf-8")
        assert_nothing_left(world)


def test_it_runs_beside_the_program_that_it_is_given(shared: World) -> None:
    other = f"{sys.executable} -c 'from fractional_gpu.gpu.simulated import cuda; cuda.launch(0.3, 1.0)'"
    found, complaint = measure_a_round(shared, "--neighbour", other, "--", sys.executable, "-c", WORKS, "8", "0.3")
    assert [one["setting"] for one in found["settings"]] == [
        {"fraction_milli": 1000, "tenants": 1},
        {"fraction_milli": 500, "tenants": 2},
    ], complaint
    assert found["settings"][0]["rounds"] >= 1
    assert_nothing_left(shared)


def test_a_pinned_kernel_of_the_user_stays_and_an_idle_one_leaves_for_a_measurement_and_comes_back_whole(
    world: World, server: Server
) -> None:
    (three_quarters,) = world.install(750)
    notebook = server.start(three_quarters)
    notebook.must(fill(1))
    notebook.must("%gpu pin 1h")
    once = ("--", "sleep", "0.1")
    status, _, complaint = measure(world, "--fractions", "1", "--within", "30m", *once)
    assert status == 1, "the first look is the answer"
    assert "could not measure: no device of pool default has" in complaint
    assert world.lease(notebook.kernel_id).suspends == 0
    notebook.must("%gpu unpin")
    _, found, complaint = measure(world, "--fractions", "1", *once)
    assert found["unit_is_whole_run"], "the program reports nothing"
    assert found["settings"][0]["unit_s"] >= 0.1, complaint
    assert "is idle: suspending it to make room" in complaint
    assert world.lease(notebook.kernel_id).suspends == 1
    assert notebook.must("print(hashlib.sha256(buffer.read()).hexdigest() == digest)").text == "True\n"


def test_others_who_come_while_it_measures_are_noticed_by_their_work_and_their_steps_repeated() -> None:
    """Including kernels that stay for whole steps, and leases that the measuring user cannot see."""
    with seated_world() as (world, seated):
        options = ("--json", "--fractions", "1/2,1", "--memory", MEMORY, "--within", "170s")
        load = (sys.executable, "-c", WORKS, "8", "0.2")
        with start(world, *options, "--", *load, environment=seated) as process:
            read_until(process, "round 1,")
            why = "another user's kernel, or a process without a lease, worked on the device"
            for kind in ("stranger", "hidden"):
                with visitor(world, seated, Visit(kind, 0, 0, 0.8)) as other:
                    try:
                        read_until(process, why)
                    finally:
                        other.terminate()
                read_until(process, "round ")
            process.send_signal(signal.SIGINT)
            printed, complaint = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130, complaint
        found = json.loads(printed)
        assert found["interrupted"]
        assert why in found["disturbed"]
        assert found["settings"][0]["rounds"] >= 2
        assert_nothing_left(world)


def test_a_program_that_fails_is_told_with_the_last_that_it_printed(shared: World) -> None:
    program = "import sys; print('no such data', file=sys.stderr); sys.exit(3)"
    status, _, complaint = measure(shared, "--fractions", "1", "--", sys.executable, "-c", program)
    assert status == 1
    assert 'the program ended with exit status 3; its last output: "no such data"' in complaint
    assert_nothing_left(shared)


def test_an_interrupt_ends_all_programs_and_leases(shared: World) -> None:
    with start(shared, "--fractions", "1/2,1", "--", sys.executable, "-c", WORKS, "8", "0.3") as process:
        until(lambda: any(one.lease.used_mib for one in shared.status().leases), "the program works")
        pids = [one.pid for one in shared.status().leases]
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, "Traceback" in complaint) == (130, False)
    assert pids
    assert_nothing_left(shared)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a program after --"),
        (("--fractions", "1/2", "--copies", "1", "--", "true"), "leave one of them out"),
        (("--copies", "0", "--", "true"), "must be a whole number from 1 to 63"),
        (("--interval", "wide", "--", "true"), "must be a percentage above 0"),
        (("--within", "1h30", "--", "true"), "invalid duration"),
        (("--neighbour", "'", "--", "true"), "quote it as for a shell"),
        (("--", "missing.ipynb"), "there is no notebook missing.ipynb"),
    ],
)
def test_wrong_words_are_told_before_anything_runs(shared: World, words: tuple[str, ...], said: str) -> None:
    done = shared.command("measure", "--json", *words)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.splitlines()) == 1
