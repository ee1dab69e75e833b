"""How good the advice on shares is, on synthetic users of several habits: right, too small, too large.

    python tests/benchmarks/share_advice.py [--users 20] [--days 28] [--seed 1] [--json]

Users of each habit of `simulator.load` work with one GPU for some days. They begin with a whole GPU or with an eighth of one, and follow
the advice every three days. The broker's recorder sees the first half of the days, and the advice is checked on the second half. The
right share is the smallest one on offer that has enough memory on every day of it and, by the model of contention, slows cells down by at
most a fifth among neighbours that use all the rest. Too small: short of memory on a day of the second half. Too large: a smaller share
would do.

What a user's notebook needs from day to day is an assumption. The simulator's habits draw it for each session (`anew`), the hardest case,
in which the past says little. In the other cases each user has a size: within 5 % each day (`steady`), 2 % more each day (`growing`), or
steady with two to four times as much on one day in ten (`peaks`).
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fractional_gpu.core.forecasts.advice import Advice, Verdict, advise, is_short
from fractional_gpu.core.forecasts.habits import HabitKey, HabitKind, Sample, Share, ShareDay, UseRecorder
from fractional_gpu.simulator.load import Habit, Load, synthetic_sessions
from fractional_gpu.simulator.traces import Session

DEVICE_MIB = 80 * 1024
OFFERS = [Share(milli, DEVICE_MIB * milli // 1000) for milli in (125, 250, 500, 750, 1000)]
HABITS = (Habit.PUBLISHED, Habit.TEACHING_LAB, Habit.BUILDERS, Habit.TRAINERS, Habit.NIGHT_JOBS)
WAYS = ("anew", "steady", "growing", "peaks")
DAY_MS = 86_400_000
ADVISED_EVERY = 3  # days
SLOWED_MILLI = 1_200
SAMPLE_MS = 60_000


@dataclass
class Outcome:
    """The result of the advice for users of one habit."""

    verdicts: Counter[str] = field(default_factory=Counter)
    right: int = 0
    too_small: int = 0
    too_large: int = 0
    unsaid: int = 0  # shares that had been short in the record, suggested with no word of it
    short_days: int = 0  # of the second half
    days: int = 0
    said_short: float = 0.0  # days that the stated risk expected to be short

    @property
    def users(self) -> int:
        """How many users had a second half to compare with."""
        return self.right + self.too_small + self.too_large


def users_days(sessions: Iterable[Session], share: Share) -> dict[str, list[ShareDay]]:
    """Return what the recorder keeps of these sessions, by user, as if each had this share; memory beyond it is not seen."""
    recorder, keys = UseRecorder(), {}
    for session in sessions:
        key = keys[session.user] = HabitKey("default", session.user, False, HabitKind.NOTEBOOK, "")
        for at_ms, sample in _samples(session, share):
            recorder.observe(at_ms, at_ms // DAY_MS, session.session_id, key, sample)
    return {user: recorder.days(key) for user, key in keys.items()}


def _samples(session: Session, share: Share) -> Iterable[tuple[int, Sample | None]]:
    """Yield what a session is at the ends of its cells, and every minute between."""
    held = 0
    ends = [*(cell.start_ms for cell in session.cells[1:]), session.close_ms]
    for cell, until in zip(session.cells, ends, strict=True):
        held = max(held, cell.gpu_mib)
        used, use = min(held, share.memory_mib), cell.util_percent * 10
        done = min(cell.start_ms + cell.duration_ms, until)
        for at_ms in range(cell.start_ms, done, SAMPLE_MS):
            yield at_ms, Sample(share, used, busy=True, use_milli=use)
        for at_ms in range(done, until, SAMPLE_MS):
            yield at_ms, Sample(share, used, busy=False)
    yield session.close_ms, None


def with_sizes(sessions: Sequence[Session], way: str, seed: int) -> list[Session]:
    """Return the sessions with each user's memory in this way."""
    if way == "anew":
        return list(sessions)
    sizes: dict[str, int] = {}
    found = []
    for session in sessions:
        day = session.open_ms // DAY_MS
        rng = random.Random(f"{seed}/{session.user}/{day}")
        size = sizes.setdefault(session.user, session.peak_mib or 1000) * rng.uniform(0.95, 1.05)
        if way == "growing":
            size *= 1.02**day
        elif way == "peaks" and rng.random() < 0.1:
            size *= rng.uniform(2.0, 4.0)
        mib = max(1, min(DEVICE_MIB, round(size)))
        cells = tuple(replace(cell, gpu_mib=mib) for cell in session.cells)
        found.append(replace(session, gpu_mib=mib, cells=cells))
    return found


def record_of(
    sessions: Sequence[Session], begins_with: Share, border: int
) -> tuple[dict[str, Share], dict[str, list[ShareDay]]]:
    """Return the share and the days of each user who follows all advice, every `ADVISED_EVERY` days until the border."""
    shares: dict[str, Share] = {}
    record: dict[str, list[ShareDay]] = {}
    for begin in range(0, border, ADVISED_EVERY):
        end = min(border, begin + ADVISED_EVERY)
        there = [one for one in sessions if begin * DAY_MS <= one.open_ms < end * DAY_MS]
        for user in sorted({one.user for one in there}):
            share = shares.setdefault(user, begins_with)
            mine = users_days([one for one in there if one.user == user], share)
            record.setdefault(user, []).extend(mine[user])
            if end < border:
                shares[user] = advise(record[user], share, OFFERS).risk.share
    return shares, record


def measured(habit: Habit, way: str, begins_with: Share, *, users: int, days: int, seed: int) -> Outcome:
    """Return what the advice after the first half is worth in the second one.

    Users with less than a whole GPU take the advice that they get on the way: what they need beyond their share is not seen at once.
    """
    drawn = synthetic_sessions(users, days, seed, Load(habit=habit, several_percent=0))
    sessions = with_sizes([one for one in drawn if one.cells and one.most_gpus == 1], way, seed)
    border = days // 2
    first = [one for one in sessions if one.close_ms < border * DAY_MS]
    shares, record = record_of(first, begins_with, border)
    second = users_days([one for one in sessions if one.open_ms >= border * DAY_MS], OFFERS[-1])
    outcome = Outcome()
    for user, mine in record.items():
        later = second.get(user, [])
        advice = advise(mine, shares[user], OFFERS)
        if advice.verdict is not Verdict.UNKNOWN and later:
            moved = advice.risk.share.milli - begins_with.milli
            outcome.verdicts["larger" if moved > 0 else "smaller" if moved else "keep"] += 1
            _count(outcome, advice, mine, later)
    return outcome


def _count(outcome: Outcome, advice: Advice, record: Sequence[ShareDay], later: Sequence[ShareDay]) -> None:
    share = advice.risk.share
    enough, days = _needed(later), len({one.day for one in later})
    short = len({one.day for one in later if is_short(share, one) and share != OFFERS[-1]})
    outcome.short_days += short
    outcome.days += days
    outcome.said_short += days * advice.risk.short_milli / 1000 if share != OFFERS[-1] else 0
    had = any(is_short(share, one) for one in record)
    outcome.unsaid += (
        advice.verdict is not Verdict.KEEP and had and not (advice.risk.short_days or advice.risk.unknown_days)
    )
    if short:
        outcome.too_small += 1
    elif share.milli > enough.milli:
        outcome.too_large += 1
    else:
        outcome.right += 1


def _needed(days: Sequence[ShareDay]) -> Share:
    """Return the smallest share on offer that has the memory of all days, and bounds the slowdown to a fifth."""
    for share in OFFERS:
        found = advise(days, share, OFFERS).present
        if not any(is_short(share, one) for one in days) and found.slowed_milli <= SLOWED_MILLI:
            return share
    return OFFERS[-1]


def table(rows: Sequence[tuple[str, str, Outcome]]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = [
        "| habit | memory from day to day | users | smaller / larger / keep | right | too small | too large | short days: seen (stated) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for habit, way, one in rows:
        whole = max(1, one.users)
        share = [f"{100 * count / whole:.0f} %" for count in (one.right, one.too_small, one.too_large)]
        said = " / ".join(str(one.verdicts[name]) for name in ("smaller", "larger", "keep"))
        short = f"{100 * one.short_days / max(1, one.days):.1f} % ({100 * one.said_short / max(1, one.days):.1f} %)"
        lines.append(f"| {habit} | {way} | {one.users} | {said} | {' | '.join(share)} | {short} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table for users that begin with a whole GPU, and for users that begin with an eighth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--days", type=int, default=28)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for begins_with in (OFFERS[-1], OFFERS[0]):
        rows = [
            (
                habit.value,
                way,
                measured(habit, way, begins_with, users=options.users, days=options.days, seed=options.seed),
            )
            for habit in HABITS
            for way in WAYS
        ]
        if options.json:
            print(
                json.dumps({"begins_with_milli": begins_with.milli, "rows": [(*row[:2], vars(row[2])) for row in rows]})
            )
        else:
            print(f"\nbegins with {begins_with.milli / 1000:g} GPU\n\n{table(rows)}")
        unsaid = sum(one.unsaid for _, _, one in rows)
        if unsaid:
            sys.exit(f"{unsaid} shares were suggested that had been short of memory, without saying so")


if __name__ == "__main__":
    main()
