"""How many hub seats fit on a device, according to a forecast of waits instead of a sum of caps.

A seat is active for `duty_milli` thousandths of its server's life, independently of other seats, and then needs `mib` of its device. The
total need at a random time has a weighted Poisson-binomial distribution. It is computed exactly, by convolution over thousandths of the
device's memory (Hong, CSDA 59, 2013; Kaufman 1981 and Roberts 1981 for calls that share trunks). Needs are rounded up, and the last bin
holds all needs beyond the device.

A cell of seat i finds no room with probability P(S > C | i active), where S is the total need and C the device's memory. The average over
cells is E[N; S > C] / E[N], where N is the number of active seats, so the convolution carries P(S = s) and E[N; S = s]. Such a cell waits
for another one to end. The median cell that uses a GPU lasts two minutes (48 hours of a notebook platform's trace). The model is
memoryless: half of the cells end in each further two minutes.

Devices between which a suspended kernel can move are forecast as one of their total size, because a cell waits only if none has room. A
share that does not divide a device counts as the next larger one that does (3/4 as a whole), because the remainders of several devices
cannot be combined. Independence fails first, in a lesson in which everyone runs the same cell: give that pool a smaller bound.

Integers only: MiB, milliseconds, millionths. The forecast does not depend on the order of the seats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

CELL_MEDIAN_MS = 120_000
_BINS = 1000  # thousandths of the device
_BINS_OF_LIKE_DEVICES = (420, 360, 240, 120, 60, 24, 12)  # for each of several; common shares are whole numbers of bins
_MOST_BINS = 1080
_WHOLE = 10**12  # probability 1 in computations
_PRIOR_LIVE_MS = 8 * 3_600_000  # weight of the prior: a working day with a server
_PRIOR_BUSY_MS = 30 * 60_000  # weight of the prior for memory, in busy time


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A user's use of a GPU: the share of the server's time that it is busy, and the device memory in use then."""

    duty_milli: int
    active_mib: int


# From the same trace: reserved GPUs were busy 25.7 % of the time; the third quartile of cells' device memory is 4.6 GB.
PRIOR_USAGE = Usage(duty_milli=257, active_mib=4400)


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class SeatLoad:
    """A seat on a device: active for `duty_milli` thousandths of the time, when it needs `mib`."""

    mib: int
    duty_milli: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatDevice:
    """A device and its seats. Suspended kernels may resume on any device of the same `kind`; if empty, only on this device."""

    device_id: str
    capacity_mib: int
    loads: tuple[SeatLoad, ...]
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Devices that are forecast together, and their seats, whose memory is rounded up (`_counted`)."""

    places: tuple[SeatDevice, ...]
    capacity_mib: int
    loads: tuple[SeatLoad, ...]  # sorted
    bins: int

    @classmethod
    def of(cls, places: Sequence[SeatDevice]) -> "_Group":
        """Return a group of devices, which must be of one kind."""
        loads = [_counted(load, places) for place in places for load in place.loads]
        return cls(
            places=tuple(places),
            capacity_mib=sum(one.capacity_mib for one in places),
            loads=tuple(sorted(loads)),
            bins=_bins_of(len(places)),
        )

    def takes(self, load: SeatLoad) -> bool:
        """Whether the seat fits on one of the devices when empty."""
        return any(load.mib <= one.capacity_mib for one in self.places)

    def wait_chance(self, load: SeatLoad) -> int:
        """Return the chance that a cell finds no room with one more seat, millionths."""
        return _wait_chance(self.loads, _counted(load, self.places), self.capacity_mib, self.bins)

    def emptiest(self, load: SeatLoad) -> SeatDevice:
        """Return the device with the least average need, among those large enough."""
        return min((one for one in self.places if load.mib <= one.capacity_mib), key=_filled_milli)


def _bins_of(devices: int) -> int:
    """Return the total number of bins: the same for each device, so that a load that fills a device fills its bins."""
    if devices == 1:
        return _BINS
    each = next((bins for bins in _BINS_OF_LIKE_DEVICES if bins * devices <= _MOST_BINS), _BINS_OF_LIKE_DEVICES[-1])
    return each * devices


def _counted(load: SeatLoad, places: Sequence[SeatDevice]) -> SeatLoad:
    """Round the load up, among several like devices, to a share that divides a device."""
    device_mib = min(place.capacity_mib for place in places)
    if len(places) == 1 or not 0 < load.mib <= device_mib:
        return load
    return SeatLoad(mib=device_mib // (device_mib // load.mib), duty_milli=load.duty_milli)


def _groups(places: Sequence[SeatDevice]) -> list[_Group]:
    """Group devices that are forecast together, in the order of their first devices."""
    found: dict[tuple[str, str], list[SeatDevice]] = {}
    for place in places:
        found.setdefault((place.kind, "" if place.kind else place.device_id), []).append(place)
    return [_Group.of(like) for like in found.values()]


def estimated_usage(*, live_ms: int, busy_ms: int, busy_mib_ms: int, prior: Usage = PRIOR_USAGE) -> Usage:
    """Estimate a user's usage from the kernels' lifetime, their busy time, and the integral of memory over busy time (MiB times ms)."""
    busy_ms = min(busy_ms, live_ms)
    duty = (busy_ms * 1000 + prior.duty_milli * _PRIOR_LIVE_MS) // (live_ms + _PRIOR_LIVE_MS)
    mib = (busy_mib_ms + prior.active_mib * _PRIOR_BUSY_MS) // (busy_ms + _PRIOR_BUSY_MS)
    return Usage(duty_milli=min(1000, max(1, duty)), active_mib=max(1, mib))


def _wait_chance(loads: tuple[SeatLoad, ...], more: SeatLoad, capacity_mib: int, bins: int) -> int:
    """Return the chance with one more seat. `loads` must be sorted, because rounding depends slightly on their order."""
    expected = sum(load.duty_milli for load in loads) + more.duty_milli
    if not expected:
        return 0
    if capacity_mib < 1:
        return 1_000_000
    chance, active = _distribution(loads, capacity_mib, bins)
    active = active.copy()
    _add_seat(chance.copy(), active, more, capacity_mib)
    return _millionths(active, expected)


def _millionths(active: list[int], expected_milli: int) -> int:
    """Return E[N; S > C] / E[N], rounded up."""
    return min(1_000_000, -(-active[-1] * 1000 * 1_000_000 // (expected_milli * _WHOLE)))


@lru_cache(maxsize=64)
def _distribution(loads: tuple[SeatLoad, ...], capacity_mib: int, bins: int) -> tuple[list[int], list[int]]:
    """Return P(S = s) and E[N; S = s] by need s; the last bin is S > C. Cached: callers must not change the lists."""
    chance, active = [0] * (bins + 2), [0] * (bins + 2)
    chance[0] = _WHOLE
    for load in loads:
        _add_seat(chance, active, load, capacity_mib)
    return chance, active


def _add_seat(chance: list[int], active: list[int], load: SeatLoad, capacity_mib: int) -> None:
    """Add a seat to the distribution in place, from the largest need down, so that none is counted twice."""
    last = len(chance) - 1
    shift, duty = -(-load.mib * (last - 1) // capacity_mib), load.duty_milli
    for need in range(last, -1, -1):
        moved = -(-chance[need] * duty // 1000)
        if not moved and not active[need]:
            continue
        counted = -(-(active[need] + chance[need]) * duty // 1000)
        stays = active[need] - active[need] * duty // 1000
        to = min(need + shift, last)
        chance[need] -= moved
        active[need] = stays
        chance[to] += moved
        active[to] += counted


def still_waiting_milli(target_ms: int, median_ms: int = CELL_MEDIAN_MS) -> int:
    """Return the thousandths of waiting cells that still wait after `target_ms`."""
    halvings, rest = divmod(target_ms, median_ms)
    if halvings >= 10:
        return 0
    upper = 1000 * (2 * median_ms - rest)  # the chord lies above the curve
    return -(-upper // (2 * median_ms << halvings))


def _late_chance(wait_millionths: int, target_ms: int) -> int:
    return -(-wait_millionths * still_waiting_milli(target_ms) // 1000)


def choose_device(
    load: SeatLoad, places: Sequence[SeatDevice], *, target_ms: int, bound_milli: int
) -> tuple[str | None, int]:
    """Return the device for one more seat, and the chance that a cell on it waits longer than the target, millionths.

    Chooses the fullest device that stays within the bound, to keep others empty for larger seats. Ties go to the first device. Among like
    devices, which share one chance, chooses the emptiest. If no device stays within the bound, returns None and the smallest chance.
    """
    forecasts = [
        (_late_chance(each.wait_chance(load), target_ms), each) for each in _groups(places) if each.takes(load)
    ]
    if not forecasts:
        return None, 1_000_000
    within = [(chance, each) for chance, each in forecasts if chance <= bound_milli * 1000]
    if not within:
        return None, min(chance for chance, _ in forecasts)
    chance, best = max(within, key=lambda one: (one[0], sum(map(_filled_milli, one[1].places)) // len(one[1].places)))
    return best.emptiest(load).device_id, chance


def wait_chance_with(load: SeatLoad, places: Sequence[SeatDevice], device_id: str) -> int:
    """Return the chance that a cell finds no room with one more seat on the device or on those like it, millionths."""
    for group in _groups(places):
        if any(place.device_id == device_id for place in group.places):
            return group.wait_chance(load)
    return 1_000_000


def least_waiting(load: SeatLoad, places: Sequence[SeatDevice]) -> tuple[SeatDevice | None, int]:
    """Return the device with the smallest chance that a cell finds no room, and that chance (millionths); None: the seat fits nowhere."""
    groups = [each for each in _groups(places) if each.takes(load)]
    chances = [(each.wait_chance(load), number) for number, each in enumerate(groups)]
    if not chances:
        return None, 1_000_000
    chance, number = min(chances)
    return groups[number].emptiest(load), chance


def wait_quantile_ms(wait_millionths: int, milli: int) -> int:
    """Return the `milli` thousandths quantile of cells' waits, ms, if `wait_millionths` of them find no room."""
    late = 1_000_000 - 1000 * milli
    if wait_millionths <= late:
        return 0
    low_ms, high_ms = 0, 10 * CELL_MEDIAN_MS
    while high_ms - low_ms > 1:
        middle_ms = (low_ms + high_ms) // 2
        if _late_chance(wait_millionths, middle_ms) > late:
            low_ms = middle_ms
        else:
            high_ms = middle_ms
    return high_ms


@lru_cache(maxsize=1024)
def more_seats(
    loads: tuple[SeatLoad, ...],
    load: SeatLoad,
    capacity_mib: int,
    *,
    target_ms: int,
    bound_milli: int,
    most: int,
    bins: int = _BINS,
) -> int:
    """Return how many more seats of this load, at most `most`, fit on a device with the sorted `loads` within the bound. Cached."""
    if load.mib > capacity_mib or not load.duty_milli or bound_milli >= 1000:
        return most if load.mib <= capacity_mib else 0
    chance, active = (known.copy() for known in _distribution(loads, capacity_mib, bins))
    expected = sum(one.duty_milli for one in loads)
    for count in range(most):
        _add_seat(chance, active, load, capacity_mib)
        expected += load.duty_milli
        if _late_chance(_millionths(active, expected), target_ms) > bound_milli * 1000:
            return count
    return most


def more_seats_in(places: Sequence[SeatDevice], load: SeatLoad, *, target_ms: int, bound_milli: int, most: int) -> int:
    """Return how many more seats of this load these devices take within the bound, at most `most` on each."""
    return sum(
        more_seats(
            group.loads,
            _counted(load, group.places),
            group.capacity_mib,
            target_ms=target_ms,
            bound_milli=bound_milli,
            most=most * len(group.places),
            bins=group.bins,
        )
        for group in _groups(places)
        if group.takes(load)
    )


def admissible_milli(counts: Mapping[int, int]) -> int:
    """Return how many thousandths can be requested, divided into fractions in any way, if these `counts` fit.

    `counts`: how many seats of each fraction (milli-GPU) fit. With `m` admissible, `m // fraction` seats of each fraction fit.
    """
    if not counts:
        return 0
    below = min((count + 1) * fraction for fraction, count in counts.items()) - 1
    smallest = min(counts)
    return below // smallest * smallest


def _filled_milli(device: SeatDevice) -> int:
    """Return the average need, thousandths of the device."""
    return sum(load.mib * load.duty_milli for load in device.loads) // max(1, device.capacity_mib)
