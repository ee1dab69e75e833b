"""The synthetic users have the statistics that are published of real ones, and each switch changes what it says."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from fractional_gpu.simulator.load import CLASS_SIZE, Habit, Load, Memory, Pace, synthetic_sessions
from fractional_gpu.simulator.traces import Cell, Session

USERS = 600
made = cache(synthetic_sessions)  # most tests look at the same sessions
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture(scope="module", params=Pace, ids=str)
def trace(request: pytest.FixtureRequest) -> tuple[Pace, list[Session]]:
    return request.param, made(USERS, 1, 1, Load(pace=request.param))


@pytest.fixture(scope="module")
def usual() -> list[Session]:
    return made(USERS, 1, 1, Load())


def gpu_cells(sessions: Sequence[Session]) -> list[Cell]:
    return [cell for session in sessions for cell in session.cells if cell.gpus]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


# -- the published figures -----------------------------------------------------------------------------------------------


def test_gpu_cells_last_as_long(trace: tuple[Pace, list[Session]]) -> None:
    pace, sessions = trace
    minutes = [cell.duration_ms / 60_000 for cell in gpu_cells(sessions)]
    median, quarter = {Pace.LONG: (11, 21), Pace.SHORT: (2, 5)}[pace]
    assert quantile(minutes, 0.5) == pytest.approx(median, rel=0.1)
    assert quantile(minutes, 0.75) == pytest.approx(quarter, rel=0.1)


def test_gaps_between_gpu_cells_are_as_long(trace: tuple[Pace, list[Session]]) -> None:
    _, sessions = trace
    gaps: list[float] = []
    for session in sessions:
        cells = gpu_cells([session])
        gaps += [(after.start_ms - before.start_ms - before.duration_ms) / 60_000 for before, after in pairwise(cells)]
    for share, minutes in ((0.25, 1), (0.5, 3), (0.75, 8), (0.9, 41)):
        assert quantile(gaps, share) == pytest.approx(minutes, rel=0.2)


def test_sessions_of_one_gpu_hold_the_peaks_of_sessions_and_each_of_several_gpus_what_one_held(
    usual: list[Session],
) -> None:
    gigabytes = {
        several: [one.peak_mib * 2**20 / 10**9 for one in usual if one.peak_mib and (one.gpus > 1) is several]
        for several in (False, True)
    }
    assert quantile(gigabytes[False], 0.5) == pytest.approx(5.3, rel=0.1)
    assert quantile(gigabytes[False], 0.75) == pytest.approx(20, rel=0.2)
    assert quantile(gigabytes[False], 0.9) == pytest.approx(35, rel=0.1)
    assert quantile(gigabytes[True], 0.5) == pytest.approx(4.7, rel=0.1)
    assert max(gigabytes[True]) < 5.4


def test_by_cells_sessions_hold_less() -> None:
    sessions = made(USERS, 1, 1, Load(memory=Memory.CELL, pace=Pace.SHORT))
    gigabytes = [cell.gpu_mib * 2**20 / 10**9 for cell in gpu_cells(sessions)]
    for share, expected in ((0.5, 2.3), (0.75, 4.6), (0.9, 18), (0.99, 38)):
        assert quantile(gigabytes, share) == pytest.approx(expected, rel=0.25)


def test_two_sessions_in_five_use_four_or_eight_gpus(usual: list[Session]) -> None:
    assert {one.gpus for one in usual} == {1, 4, 8}
    assert sum(one.gpus > 1 for one in usual) / len(usual) == pytest.approx(23 / 59, abs=0.03)
    assert all(cell.gpus == one.gpus for one in usual for cell in one.cells if cell.gpus)


def test_cells_use_the_gpu_as_little(trace: tuple[Pace, list[Session]]) -> None:
    percents = [float(cell.util_percent) for cell in gpu_cells(trace[1])]
    assert quantile(percents, 0.5) == pytest.approx(8.5, abs=1)
    assert quantile(percents, 0.9) == pytest.approx(36, abs=4)


def test_reserved_gpus_are_busy_a_quarter_of_the_time_and_many_sessions_hardly_at_all(
    trace: tuple[Pace, list[Session]],
) -> None:
    pace, sessions = trace
    busy = [one.gpus * sum(cell.duration_ms for cell in gpu_cells([one])) for one in sessions]
    reserved = [one.gpus * (one.close_ms - one.open_ms) for one in sessions]
    assert sum(busy) / sum(reserved) == pytest.approx(0.257, abs=0.03)
    light = sum(20 * used <= length for used, length in zip(busy, reserved, strict=True))
    assert light / len(sessions) == pytest.approx({Pace.LONG: 0.38, Pace.SHORT: 0.75}[pace], abs=0.06)


def test_a_seed_is_a_trace(usual: list[Session]) -> None:
    assert synthetic_sessions(USERS, 1, 1) == usual
    assert synthetic_sessions(USERS, 1, 2) != usual


def test_more_users_leave_what_the_others_do(usual: list[Session]) -> None:
    names = {session.user for session in usual}
    assert [one for one in synthetic_sessions(USERS + 50, 1, 1) if one.user in names] == usual


ALL = Load(joint_percent=40, lunch_ms=3 * HOUR_MS, weekends=True, time_zones=3, ask_error_percent=40)


@pytest.mark.parametrize(
    "load",
    [
        Load(),
        Load(pace=Pace.SHORT),
        ALL,
        replace(ALL, pace=Pace.SHORT),
        *(Load(habit=habit) for habit in Habit),
        *(replace(ALL, habit=habit) for habit in Habit),
    ],
)
def test_cells_lie_inside_their_sessions_and_after_one_another(load: Load) -> None:
    for session in synthetic_sessions(100, 1, 1, load):
        ends = [cell.start_ms + cell.duration_ms for cell in session.cells]
        starts = [cell.start_ms for cell in session.cells]
        assert not starts or session.open_ms <= starts[0]
        assert not ends or ends[-1] <= session.close_ms
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


# -- switches ------------------------------------------------------------------------------------------------------------


def test_a_class_begins_together(usual: list[Session]) -> None:
    sessions = synthetic_sessions(100, 1, 1, Load(joint_percent=40))
    usually = {session.session_id: session for session in usual}
    moved = [
        one for one in sessions if one.session_id.endswith("work") and one.open_ms != usually[one.session_id].open_ms
    ]
    assert len(moved) == 40
    by_number = sorted(moved, key=lambda one: one.user)
    for first in range(0, 40, CLASS_SIZE):
        members = by_number[first : first + CLASS_SIZE]
        opens, begins = [one.open_ms for one in members], [one.cells[0].start_ms for one in members]
        assert max(opens) - min(opens) <= 60_000
        assert max(opens) <= min(begins)
        assert max(begins) - min(begins) <= 60_000
    opens = [one.open_ms for one in by_number]
    assert max(opens) - min(opens) > HOUR_MS  # the two classes are not one


def test_no_cell_begins_at_lunch(usual: list[Session]) -> None:
    lunch = made(USERS, 1, 1, Load(lunch_ms=2 * HOUR_MS))

    def begin(sessions: Sequence[Session], hour: int) -> int:
        return sum(hour * HOUR_MS <= cell.start_ms < (hour + 1) * HOUR_MS for cell in gpu_cells(sessions))

    # a lunch of two hours begins from 12 to 1: from 1 to 2 all are away, from 2 to 3 all come back
    assert begin(usual, 13) > 100
    assert begin(lunch, 13) == 0
    assert begin(lunch, 14) > 1.5 * begin(usual, 14)


def test_weekends_are_free() -> None:
    days = {session.open_ms // DAY_MS for session in synthetic_sessions(20, 10, 1, Load(weekends=True))}
    assert days == {0, 1, 2, 3, 4, 7, 8, 9}
    worked = synthetic_sessions(20, 10, 1)
    assert [one for one in worked if one.open_ms // DAY_MS in days] == synthetic_sessions(
        20, 10, 1, Load(weekends=True)
    )


def test_people_ask_for_more_or_less_than_they_use(usual: list[Session]) -> None:
    assert all(one.asked_mib == 0 for one in usual)
    ratios = [one.asked_mib / one.gpu_mib for one in made(USERS, 1, 1, Load(ask_error_percent=50))]
    assert quantile(ratios, 0.5) == pytest.approx(1, rel=0.1)
    assert quantile(ratios, 1 / 6) == pytest.approx(0.61, rel=0.1)
    assert quantile(ratios, 5 / 6) == pytest.approx(1.65, rel=0.1)


def drawn(session: Session) -> dict[str, list[object]]:
    """What is drawn for a session, by what it is about; the times of day are left out, which the order of the day decides."""
    cells = gpu_cells([session])
    return {
        "memory": [session.gpu_mib],
        "several": [session.gpus],
        "asked": [session.asked_mib / session.gpu_mib],
        "priority": [session.priority],
        "length": [cell.duration_ms for cell in cells],
        "util": [cell.util_percent for cell in cells],
    }


@pytest.mark.parametrize(
    ("load", "changes"),
    [
        (Load(habit=Habit.BUILDERS), {"memory", "several", "length"}),  # hours and utilisation are drawn alike
        (Load(pace=Pace.SHORT), {"length"}),
        (Load(memory=Memory.CELL), {"memory"}),
        (Load(several_percent=0), {"several", "memory"}),  # a session of several GPUs holds less on each
        (Load(joint_percent=50), set()),
        (Load(lunch_ms=HOUR_MS), set()),
        (Load(weekends=True), set()),
        (Load(weekends=True, weekend_percent=10), set()),
        (Load(time_zones=4), set()),
        (Load(ask_error_percent=50), {"asked"}),
        (Load(failed_swaps_percent=50), set()),
        (Load(urgent_percent=50), {"priority"}),
    ],
)
def test_a_switch_leaves_the_other_draws_as_they_are(load: Load, changes: set[str], usual: list[Session]) -> None:
    switched = {session.session_id: session for session in synthetic_sessions(100, 1, 1, load)}
    differ: set[str] = set()
    for session in usual:
        if session.session_id not in switched:
            continue  # a user beyond the hundred, or another habit, which has other sessions
        before, after = drawn(session), drawn(switched[session.session_id])
        # a session may have more or fewer cells; the common ones are equal
        differ |= {
            what
            for what, values in before.items()
            if any(one != other for one, other in zip(values, after[what], strict=False))
        }
    assert differ == changes


# -- other habits --------------------------------------------------------------------------------------------------------


@cache
def works(habit: Habit, days: int = 1) -> tuple[Session, ...]:
    """The working sessions of a group with a habit."""
    sessions = made(USERS, days, 1, Load(habit=habit))
    return tuple(one for one in sessions if one.session_id.endswith("work"))


def quantiles(habit: Habit, *shares: float) -> dict[str, list[float]]:
    """Quantiles of the cells' lengths and of the gaps between them, s, and of the memory that sessions hold, GiB."""
    sessions = works(habit, days=2)
    cells = [cell.duration_ms / 1000 for cell in gpu_cells(sessions)]
    gaps = [
        (after.start_ms - before.start_ms - before.duration_ms) / 1000
        for one in sessions
        for before, after in pairwise(one.cells)
    ]
    memory = [one.gpu_mib / 1024 for one in sessions]
    return {
        what: [quantile(values, share) for share in shares]
        for what, values in (("cell", cells), ("gap", gaps), ("memory", memory))
    }


def test_a_teaching_lab_begins_and_ends_together_with_short_cells_and_little_memory() -> None:
    sessions = works(Habit.TEACHING_LAB)
    classes = [[one for one in sessions if int(one.user[1:]) // CLASS_SIZE == number] for number in range(30)]
    assert [len(members) for members in classes] == [CLASS_SIZE] * 30
    for members in classes:
        opens = [one.open_ms for one in members]
        assert max(opens) - min(opens) <= 60_000
        assert len({one.close_ms for one in members}) == 1
        assert members[0].close_ms - max(opens) == pytest.approx(1.5 * HOUR_MS, abs=60_000)
        assert all(one.cells[0].start_ms - one.open_ms <= 480_000 for one in members if one.cells)
    assert len({members[0].close_ms for members in classes}) == 30
    found = quantiles(Habit.TEACHING_LAB, 0.5, 0.9)
    assert found["cell"] == pytest.approx([6, 40], rel=0.1)
    assert found["gap"] == pytest.approx([40, 360], rel=0.15)
    assert found["memory"] == pytest.approx([0.8, 2], rel=0.15)
    assert {one.gpus for one in sessions} == {1}


def test_builders_run_short_cells_with_gaps_of_minutes_and_long_pauses() -> None:
    found = quantiles(Habit.BUILDERS, 0.5, 0.9, 0.97)
    assert found["cell"][:2] == pytest.approx([20, 240], rel=0.1)
    assert found["gap"] == pytest.approx([180, 1500, 5400], rel=0.15)
    assert found["memory"][:2] == pytest.approx([2.15, 16.6], rel=0.2)
    assert len(gpu_cells(works(Habit.BUILDERS))) > 20 * USERS


def test_trainers_run_few_cells_of_hours_that_hold_much_and_some_use_several_gpus() -> None:
    sessions = works(Habit.TRAINERS)
    found = quantiles(Habit.TRAINERS, 0.5, 0.9)
    assert found["cell"] == pytest.approx([7200, 28_800], rel=0.1)
    assert found["gap"] == pytest.approx([600, 7200], rel=0.25)
    assert found["memory"] == pytest.approx([23.4, 58.6], rel=0.1)
    assert len(gpu_cells(sessions)) < 5 * USERS
    assert {one.gpus for one in sessions} == {1, 2, 4, 8}
    assert sum(one.gpus > 1 for one in sessions) / USERS == pytest.approx(0.3, abs=0.05)


def test_night_jobs_begin_in_the_evening_and_run_over_night_after_a_few_short_cells() -> None:
    for one in works(Habit.NIGHT_JOBS):
        *day, night = one.cells
        assert len(day) <= 8
        assert all(cell.start_ms < 19.5 * HOUR_MS and cell.duration_ms <= 1_800_000 for cell in day)
        assert 17 * HOUR_MS <= night.start_ms < 20.5 * HOUR_MS
        assert 8 * HOUR_MS <= night.duration_ms <= 12 * HOUR_MS
        assert 32 * HOUR_MS <= one.close_ms <= 33 * HOUR_MS
    assert quantile([float(len(one.cells)) for one in works(Habit.NIGHT_JOBS)], 0.5) in {4, 5}


def test_a_fifth_of_mixed_users_has_each_habit_and_works_as_in_a_separate_group() -> None:
    mixed = made(USERS, 1, 1, Load(habit=Habit.MIXED))
    habits = [habit for habit in Habit if habit is not Habit.MIXED]
    for place, habit in enumerate(habits):
        own = [one for one in made(USERS, 1, 1, Load(habit=habit)) if int(one.user[1:]) % 5 == place]
        found = [one for one in mixed if int(one.user[1:]) % 5 == place]
        if habit is Habit.TEACHING_LAB:  # its classes are other ones
            assert [drawn(one)["memory"] for one in sorted(found, key=lambda one: one.user)] == [
                drawn(one)["memory"] for one in sorted(own, key=lambda one: one.user)
            ]
            assert len({one.close_ms for one in found}) == USERS // 5 // CLASS_SIZE
        else:
            assert found == own


@pytest.mark.parametrize("habit", Habit)
def test_switches_leave_what_is_drawn_for_a_habit(habit: Habit) -> None:
    """Lunch, time zones, priorities and errors in what is asked for change what they promise, for every habit."""
    plain = {one.session_id: one for one in synthetic_sessions(40, 1, 1, Load(habit=habit))}
    turned = replace(ALL, habit=habit, joint_percent=0, weekends=False, urgent_percent=30)
    if habit in {Habit.NIGHT_JOBS, Habit.MIXED}:
        turned = replace(turned, lunch_ms=0)  # fewer cells by day would give the night's another number
    differ = set[str]()
    for one in synthetic_sessions(40, 1, 1, turned):
        before, after = drawn(plain[one.session_id]), drawn(one)
        differ |= {
            what
            for what, values in before.items()
            if any(old != new for old, new in zip(values, after[what], strict=False))
        }
    assert differ == {"asked", "priority"}
