"""The switches of the synthetic load."""

from dataclasses import dataclass
from enum import StrEnum

CLASS_SIZE = 20
SEVERAL_PERCENT = 39  # 23 of 59


class Habit(StrEnum):
    """How the users work: as in the published trace, in one of the ways of `habits`, or a fifth of them in each way."""

    PUBLISHED = "published"
    TEACHING_LAB = "teaching-lab"
    BUILDERS = "builders"
    TRAINERS = "trainers"
    NIGHT_JOBS = "night-jobs"
    MIXED = "mixed"


class Pace(StrEnum):
    """How long cells on a GPU take, and how many there are."""

    LONG = "long"
    SHORT = "short"


class Memory(StrEnum):
    """What a session holds: its peak, or what one cell held."""

    SESSION = "session"
    CELL = "cell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the synthetic users do; the defaults are the trace's.

    Percentages are whole ones. `pace`, `memory`, `several_percent` and `joint_percent` say how users of the published habit work, and
    nothing of the other habits. `several_percent` of the sessions use 4 or 8 GPUs. `joint_percent` of the users are in classes of
    `CLASS_SIZE` whose working sessions open within a minute, and whose first cells begin within another. `lunch_ms` is how long a lunch
    takes that begins at some time from 12 to 1: no cell begins in it, but those of a teaching lab. With `weekends`, the sixth and the
    seventh day of a week are free, but for `weekend_percent` of the users, drawn for each such day. The users live in `time_zones`
    evenly spread around the clock. `ask_error_percent` is the standard deviation of the logarithm of what people ask for over what they
    use: with 50, one in six asks for less than 0.61 of it, and one in six for more than 1.65 times as much. `failed_swaps_percent` of
    the swaps fail harmlessly, after the fixed time of a swap (`machine.Host`). `urgent_percent` of the users, spread evenly among them,
    have priority 1.
    """

    habit: Habit = Habit.PUBLISHED
    pace: Pace = Pace.LONG
    memory: Memory = Memory.SESSION
    several_percent: int = SEVERAL_PERCENT
    joint_percent: int = 0
    lunch_ms: int = 0
    weekends: bool = False
    weekend_percent: int = 0
    time_zones: int = 1
    ask_error_percent: int = 0
    failed_swaps_percent: int = 0
    urgent_percent: int = 0
