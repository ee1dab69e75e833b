"""Devices that leave a simulated run: published lifetimes, what each order saves, and sessions that continue."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.commands.main import main
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.record import EventLog, recording, replay
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.revocation import (
    HOUR_MS,
    LONGEST_MS,
    NO_NOTICE,
    OTHERS,
    OURS,
    PUBLISHED,
    Holder,
    Lifetimes,
    Revocation,
    lifetimes_of,
    saved_in,
)
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session
from tests.simulator.by_hand import SWAP, gpu_cell, host, session
from tests.simulator.loads import BUSY

pytestmark = pytest.mark.promise("revocation")

AN_HOUR = Lifetimes(servers=1, revoked=(1, *(0,) * 23))
"""Each server is revoked within its first hour."""


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def test_the_shares_are_those_of_the_paper() -> None:
    shares = {
        f"{gpu}/{region}": 1000 * sum(curve.revoked) // curve.servers
        for gpu, regions in PUBLISHED.items()
        for region, curve in regions.items()
    }
    assert shares == {
        "k80/us-central1": 562,
        "k80/us-west1": 229,
        "k80/europe-west1": 666,
        "k80/us-east1": 466,
        "p100/us-east1": 700,
        "p100/europe-west1": 266,
        "p100/us-central1": 533,
        "p100/us-west1": 666,
        "v100/europe-west4": 433,
        "v100/asia-east1": 466,
        "v100/us-central1": 666,
        "v100/us-west1": 733,
    }
    assert sum(curve.servers for curve in PUBLISHED["k80"].values()) == 156, "as the authors' repository says"


@given(
    kind=st.sampled_from([f"{gpu}/{region}" for gpu, regions in PUBLISHED.items() for region in regions]),
    seed=st.integers(),
)
def test_a_lifetime_is_at_most_a_day_and_in_an_hour_in_which_servers_were_revoked(kind: str, seed: int) -> None:
    lifetimes = lifetimes_of(kind)
    lifetime_ms = lifetimes.draw_ms(Random(seed))
    assert 0 < lifetime_ms <= LONGEST_MS
    assert lifetime_ms == LONGEST_MS or lifetimes.revoked[lifetime_ms // HOUR_MS] > 0


# -- orders ------------------------------------------------------------------------------------------------------------


def holder(name: str, mib: int, swap_ms: int, under_way_until_ms: int | None = None) -> Holder:
    return Holder(lease_id=name, mib=mib, swap_ms=swap_ms, work=1, value=1, under_way_until_ms=under_way_until_ms)


def test_saves_follow_one_another_and_one_that_has_not_ended_is_lost() -> None:
    there = [holder("a", 10, 400), holder("b", 10, 600), holder("c", 10, 1)]
    assert saved_in(there, free_ms=[0], deadline_ms=1_000, host_left_mib=100) == {"a", "b"}
    assert saved_in(there, free_ms=[1], deadline_ms=1_000, host_left_mib=100) == {"a"}
    assert saved_in(there, free_ms=[0, 0], deadline_ms=1_000, host_left_mib=100) == {"a", "b", "c"}


def test_what_host_memory_does_not_hold_is_left_out_and_a_save_under_way_ends_as_it_does() -> None:
    there = [holder("large", 60, 1), holder("small", 50, 1), holder("done", 99, 1, 900), holder("late", 1, 1, 1_001)]
    assert saved_in(there, free_ms=[0], deadline_ms=1_000, host_left_mib=59) == {"small", "done"}


@given(st.lists(st.integers(1, 1000), max_size=12), st.integers(0, 5000), st.integers())
def test_smallest_first_saves_as_many_as_any_order_where_time_alone_counts(
    times_ms: list[int], deadline_ms: int, seed: int
) -> None:
    there = [holder(f"k{number}", time_ms, time_ms) for number, time_ms in enumerate(times_ms)]
    saved = {
        name: saved_in(order(there, Random(seed)), free_ms=[0], deadline_ms=deadline_ms, host_left_mib=1 << 30)
        for name, order in OTHERS.items()
    }
    assert len(saved["smallest-first"]) >= len(saved["random"])


# -- runs --------------------------------------------------------------------------------------------------------------


def revoked(
    *trace: Session, notice_ms: int = 30_000, whole_hosts: bool = False, record: EventLog | None = None
) -> Result:
    revocation = Revocation(lifetimes=AN_HOUR, notice_ms=notice_ms, whole_hosts=whole_hosts, seed=SEED)
    return simulate(host(), trace, revocation=revocation, record=record)


def lives_ms(life: int = 0, seed: int | None = None) -> int:
    """Return for how long the device of these runs, or its replacement, lives."""
    return AN_HOUR.draw_ms(Random(f"{SEED if seed is None else seed}/lifetime/0/d0/{life}"))


SEED = next(seed for seed in range(1000) if lives_ms(0, seed) > 600_000 and lives_ms(1, seed) > 1_000_000)
"""The sessions below see one device go away, and end before its replacement does."""


def unsaved(result: Result) -> dict[str, int]:
    assert result.revocation is not None
    return {name: loss.kernels for name, loss in result.revocation.unsaved.items()}


def test_with_a_notice_an_idle_kernel_is_saved_and_its_next_cell_runs_on_the_replacement() -> None:
    gone_ms = lives_ms()
    trace = session("a", gpu_cell(0, 1_000), gpu_cell(gone_ms + 10_000, 1_000), close_ms=gone_ms + 300_000)
    result = revoked(trace)
    assert unsaved(result) == {OURS: 0, "smallest-first": 0, "random": 0, NO_NOTICE: 1}
    assert (result.suspends, result.resumes, result.lost) == (1, 1, 0)
    assert result.waits.ordered[-1] == 77_000 + SWAP.restore_ms(6000), "the replacement comes after 87 s"


def test_without_a_notice_its_state_is_lost_and_the_session_goes_on_in_a_new_process() -> None:
    gone_ms = lives_ms()
    trace = session("a", gpu_cell(0, 1_000), gpu_cell(gone_ms + 10_000, 1_000), close_ms=gone_ms + 300_000)
    result = revoked(trace, notice_ms=0)
    assert unsaved(result) == {OURS: 1, "smallest-first": 1, "random": 1, NO_NOTICE: 1}
    assert (result.suspends, result.resumes, result.lost, result.out_of_memory) == (0, 0, 0, 0)
    assert result.waits.ordered[-1] == 77_000
    assert result.revocation is not None
    assert result.revocation.unsaved[OURS].work == 1_000


def test_a_cell_that_runs_when_its_device_goes_has_failed_and_the_next_one_comes() -> None:
    gone_ms = lives_ms()
    trace = session(
        "a", gpu_cell(gone_ms - 60_000, 120_000), gpu_cell(gone_ms + 120_000, 1_000), close_ms=gone_ms + 900_000
    )
    result = revoked(trace, notice_ms=0)
    assert unsaved(result)[OURS] == 1
    assert (len(result.waits.ordered), result.lost) == (2, 0)
    assert result.busy == (60_000 + 1_000) * 1000


def test_a_save_that_is_under_way_when_the_device_goes_is_lost() -> None:
    """The arbiter trusts its forecasts, which do not know this device yet: it starts a save of 6.1 s five seconds before."""
    gone_ms = lives_ms()
    trace = session("a", gpu_cell(0, 1_000), close_ms=gone_ms + 300_000)
    result = revoked(trace, notice_ms=5_000)
    assert unsaved(result) == {OURS: 1, "smallest-first": 1, "random": 1, NO_NOTICE: 1}
    assert (result.host_peak_mib, result.lost) == (0, 0)


def test_a_whole_host_takes_what_was_saved_along() -> None:
    gone_ms = lives_ms()
    cells = (gpu_cell(0, 1_000), gpu_cell(gone_ms + 120_000, 1_000))
    trace = [
        session("a", *cells, close_ms=gone_ms + 900_000),
        session("b", gpu_cell(60_000, 1_000), close_ms=gone_ms + 900_000),
    ]
    result = revoked(*trace, whole_hosts=True)
    assert result.revocation is not None
    figures = result.revocation.as_json()
    assert unsaved(result) == {OURS: 0, "smallest-first": 0, "random": 0, NO_NOTICE: 1}
    lost = figures["lost_with_the_hosts"]
    assert isinstance(lost, dict)
    assert lost["kernels"] == 2, "the one that was suspended for the other, too"
    assert (result.resumes, result.lost) == (0, 0), "its next cell begins in a new process"


@pytest.mark.parametrize("whole_hosts", [False, True])
@pytest.mark.parametrize("notice_ms", [0, 3_000, 30_000])
def test_a_day_of_many_users_comes_to_its_end_in_each_case_and_no_order_saves_what_was_not_there(
    notice_ms: int, *, whole_hosts: bool
) -> None:
    trace = synthetic_sessions(6, 1, 3, BUSY)
    revocation = Revocation(
        lifetimes=lifetimes_of("v100/us-central1"), notice_ms=notice_ms, whole_hosts=whole_hosts, seed=7
    )
    machine = (host(2, 40_000), host(1, 80_000))
    results = [simulate(machine, trace, revocation=revocation) for _ in range(2)]
    figures = [result.revocation.as_json() for result in results if result.revocation is not None]
    assert figures[0] == figures[1]
    result = results[0]
    assert (result.lost, result.out_of_memory) == (0, 0)
    assert result.revocation is not None
    assert result.revocation.notices > 0
    there = result.revocation.there
    assert result.revocation.unsaved[NO_NOTICE] == there
    for loss in result.revocation.unsaved.values():
        assert (loss.kernels, loss.mib, loss.work, loss.value) <= (there.kernels, there.mib, there.work, there.value)


def test_a_run_with_revocations_is_recorded_and_replayed(tmp_path: Path) -> None:
    gone_ms = lives_ms()
    trace = [session("a", gpu_cell(0, 1_000), gpu_cell(gone_ms + 10_000, 1_000), close_ms=gone_ms + 300_000)]
    with recording(tmp_path / "run.log", host(), trace) as log:
        revoked(*trace, record=log)
    assert replay(tmp_path / "run.log")[0] > 0


# -- the command -------------------------------------------------------------------------------------------------------

SMALL = ("simulate", "--users", "3", "--devices", "1x80GiB", "--set", "several_gpus=0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "revoke=t4"), "no lifetimes of 't4' were published"),
        (("--set", "revoke_notice=3s"), "revoke_notice=3s needs revoke"),
        (("--set", "revoke=v100", "--baseline", "cull"), "cannot be combined: baselines do not support revocation"),
        (("--set", "revoke=v100", "--find-devices"), "revoke and find_devices=true cannot be combined"),
        (("--set", "revoke=v100", "--set", "revoke_notice=2h"), "is too long; use at most 1h"),
        (("--set", "revoke=v100", "--set", "revoke_replace=soon"), "`$.revoke_replace`"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main([*SMALL, *arguments]) == 2
    assert said in capsys.readouterr().err
