"""Computes how many hub seats fit on a device, based on forecast waiting times rather than the sum of the seats' caps.

The model assumes that a seat is active for `duty_milli` thousandths of its server's life, independently of other seats, and needs `mib` MiB
of device memory while active. The total need at any moment then has a weighted Poisson-binomial distribution. It is computed exactly, by
convolution over thousandths of the device's memory (Hong, CSDA 59, 2013; Kaufman 1981 and Roberts 1981 for calls sharing trunks). Needs are
rounded up, and the last bin holds all totals that exceed the device.

A cell of seat i finds no room with probability P(S > C | i active), where S is the total need and C is the device's memory. The average
over cells is E[N; S > C] / E[N], where N is the number of active seats. The convolution therefore tracks P(S = s) and E[N; S = s]. A cell
that finds no room waits until another cell ends. The median GPU cell lasts two minutes (in a 48-hour trace from a notebook platform). The
model is memoryless: at any moment, half of the cells still running end within the next two minutes.

If suspended kernels can move between devices, the devices are treated as one device of their combined size, because a cell waits only if
none of them has room. A share that does not divide a device evenly is rounded up to one that does (3/4 becomes a whole device), because
leftover room on several devices cannot be combined. Seats are least independent in a class where everyone runs the same cell, so a pool for
classes should have a smaller bound.

All values are integers, such as MiB, milliseconds and millionths. The forecast does not depend on the order of the seats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

CELL_MEDIAN_MS = 120_000
_BINS = 1000  # thousandths of the device
_BINS_OF_LIKE_DEVICES = (420, 360, 240, 120, 60, 24, 12)  # for each device; common shares are whole numbers of bins
_MOST_BINS = 1080
_WHOLE = 10**12  # probability 1 in computations
_PRIOR_LIVE_MS = 8 * 3_600_000  # weight of the prior: a working day with a server
_PRIOR_BUSY_MS = 30 * 60_000  # weight of the prior for memory, in busy time


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A user's GPU usage: the part of the server's lifetime during which kernels are busy, and how much memory they use while busy."""

    duty_milli: int
    active_mib: int


# From the same trace: reserved GPUs were busy 25.7 % of the time; the third quartile of cells' device memory is 4.6 GB.
PRIOR_USAGE = Usage(duty_milli=257, active_mib=4400)


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class SeatLoad:
    """A seat's load. The seat is active for `duty_milli` thousandths of the time, and needs `mib` MiB of device memory while active."""

    mib: int
    duty_milli: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatDevice:
    """A device and its seats.

    Suspended kernels can resume on any device of the same `kind`. If `kind` is empty, they can only resume on this device.
    """

    device_id: str
    capacity_mib: int
    loads: tuple[SeatLoad, ...]
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Devices of one kind and their seats, treated as one large device. Seats' memory is rounded up by `_counted`."""

    places: tuple[SeatDevice, ...]
    capacity_mib: int
    loads: tuple[SeatLoad, ...]  # sorted
    bins: int

    @classmethod
    def of(cls, places: Sequence[SeatDevice]) -> "_Group":
        """Return these devices as a group. They must all be of one kind."""
        loads = [_counted(load, places) for place in places for load in place.loads]
        return cls(
            places=tuple(places),
            capacity_mib=sum(one.capacity_mib for one in places),
            loads=tuple(sorted(loads)),
            bins=_bins_of(len(places)),
        )

    def takes(self, load: SeatLoad) -> bool:
        """Return whether one of the devices is large enough for the seat."""
        return any(load.mib <= one.capacity_mib for one in self.places)

    def wait_chance(self, load: SeatLoad) -> int:
        """Return the chance, in millionths, that a cell finds no free memory if one more seat is added."""
        return _wait_chance(self.loads, _counted(load, self.places), self.capacity_mib, self.bins)

    def emptiest(self, load: SeatLoad) -> SeatDevice:
        """Return the device whose seats need the least memory on average, ignoring devices that are too small for the new seat."""
        return min((one for one in self.places if load.mib <= one.capacity_mib), key=_filled_milli)


def _bins_of(devices: int) -> int:
    """Return the number of bins for the combined memory of this many devices. Each device gets the same whole number of bins."""
    if devices == 1:
        return _BINS
    each = next((bins for bins in _BINS_OF_LIKE_DEVICES if bins * devices <= _MOST_BINS), _BINS_OF_LIKE_DEVICES[-1])
    return each * devices


def _counted(load: SeatLoad, places: Sequence[SeatDevice]) -> SeatLoad:
    """Return the load. If there are several devices, its memory is rounded up to a share that divides a device evenly."""
    device_mib = min(place.capacity_mib for place in places)
    if len(places) == 1 or not 0 < load.mib <= device_mib:
        return load
    return SeatLoad(mib=device_mib // (device_mib // load.mib), duty_milli=load.duty_milli)


def _groups(places: Sequence[SeatDevice]) -> list[_Group]:
    """Group devices by kind, because devices of the same kind are forecast together. Groups are in the order of their first devices."""
    found: dict[tuple[str, str], list[SeatDevice]] = {}
    for place in places:
        found.setdefault((place.kind, "" if place.kind else place.device_id), []).append(place)
    return [_Group.of(like) for like in found.values()]


def estimated_usage(*, live_ms: int, busy_ms: int, busy_mib_ms: int, prior: Usage = PRIOR_USAGE) -> Usage:
    """Estimate a user's usage from how long kernels existed, how long they were busy, and their memory use while busy (MiB times ms)."""
    busy_ms = min(busy_ms, live_ms)
    duty = (busy_ms * 1000 + prior.duty_milli * _PRIOR_LIVE_MS) // (live_ms + _PRIOR_LIVE_MS)
    mib = (busy_mib_ms + prior.active_mib * _PRIOR_BUSY_MS) // (busy_ms + _PRIOR_BUSY_MS)
    return Usage(duty_milli=min(1000, max(1, duty)), active_mib=max(1, mib))


def _wait_chance(loads: tuple[SeatLoad, ...], more: SeatLoad, capacity_mib: int, bins: int) -> int:
    """Return the chance, in millionths, that a cell finds no free memory if the seat `more` is added.

    `loads` must be sorted, because rounding depends slightly on their order.
    """
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
    """Return the chance that a cell finds no free memory (E[N; S > C] / E[N] in the module's terms), in millionths, rounded up."""
    return min(1_000_000, -(-active[-1] * 1000 * 1_000_000 // (expected_milli * _WHOLE)))


@lru_cache(maxsize=64)
def _distribution(loads: tuple[SeatLoad, ...], capacity_mib: int, bins: int) -> tuple[list[int], list[int]]:
    """Return P(S = s) and E[N; S = s] (see the module docs) for each total need s, with S > C in the last bin. Don't modify the lists."""
    chance, active = [0] * (bins + 2), [0] * (bins + 2)
    chance[0] = _WHOLE
    for load in loads:
        _add_seat(chance, active, load, capacity_mib)
    return chance, active


def _add_seat(chance: list[int], active: list[int], load: SeatLoad, capacity_mib: int) -> None:
    """Add a seat to the distribution in place, working down from the largest need so that the seat isn't counted twice."""
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
    """Return how many out of every thousand cells that find no free memory are still waiting after `target_ms`."""
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
    """Return the device on which to place one more seat, and the chance, in millionths, that a cell there waits longer than the target.

    The fullest device that stays within the bound is chosen, to keep other devices empty for larger seats. Ties go to the first device.
    Devices of the same kind all have the same chance, so the emptiest of them is chosen. If no device stays within the bound, return None
    and the smallest chance found.
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
    """Return the chance, in millionths, that a cell finds no free memory if a seat is added to this device or others of its kind."""
    for group in _groups(places):
        if any(place.device_id == device_id for place in group.places):
            return group.wait_chance(load)
    return 1_000_000


def least_waiting(load: SeatLoad, places: Sequence[SeatDevice]) -> tuple[SeatDevice | None, int]:
    """Return the device where a cell is least likely to find no free memory, and the chance that it finds none, in millionths.

    The device is None if the seat fits nowhere.
    """
    groups = [each for each in _groups(places) if each.takes(load)]
    chances = [(each.wait_chance(load), number) for number, each in enumerate(groups)]
    if not chances:
        return None, 1_000_000
    chance, number = min(chances)
    return groups[number].emptiest(load), chance


def wait_quantile_ms(wait_millionths: int, milli: int) -> int:
    """Return the `milli`/1000 quantile of all cells' waits, in ms, if `wait_millionths` of every million cells find no free memory."""
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
    """Return how many more seats with this load, up to `most`, a device can take without exceeding the bound.

    `loads` must be sorted. The result is cached.
    """
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
    """Return how many more seats with this load these devices can take without exceeding the bound, up to `most` per device."""
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
    """Return how many milli-GPU can be requested in total, however they are divided into fractions.

    `counts` maps each fraction, in milli-GPU, to the number of seats of that size that fit. If the result is `m`, then `m // fraction`
    seats of any fraction fit.
    """
    if not counts:
        return 0
    below = min((count + 1) * fraction for fraction, count in counts.items()) - 1
    smallest = min(counts)
    return below // smallest * smallest


def _filled_milli(device: SeatDevice) -> int:
    """Return how much of the device's memory its seats need on average, in thousandths."""
    return sum(load.mib * load.duty_milli for load in device.loads) // max(1, device.capacity_mib)
