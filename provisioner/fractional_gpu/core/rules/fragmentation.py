"""Which of the devices where a lease fits it gets: the one where it spoils least of the free memory for the asks to come.

**Measure.** Free memory that no lease can use is as good as gone. How much of a device's free memory is usable depends on what is asked
for: 30 GiB serve one ask for 20 GiB, three for 10 GiB, and none for 40 GiB. The mix of a pool (`forecasts.asks`) says how often each size
is asked for; what a lease *spoils* on a device is what the device can give to the mix before, less what it can after, in the mean over the
asks. An ask for several devices uses only devices that have its memory free, and only so many of one kind at a time.

That is fragmentation gradient descent (Weng et al., "Beware of Fragmentation", USENIX ATC 2023), for memory instead of GPU shares, with
a mix that is learnt on line instead of known, and with what a device can give counted in whole asks.

**Order.** The least spoilt comes first, then the least memory left (best fit), then the first of the given devices. While no lease
has asked, nothing can be spoilt, so that is best fit. Where a pool weighs compute, callers give only the devices that are equal by that.

Every choice of a device goes through `DeviceChoice`: the arbiter's, and that of the placement benchmark (`simulator.policies`).
"""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease
from fractional_gpu.core.forecasts.asks import AskMix

Place = tuple[str, int]
"""A device's id, and how much memory is free there, MiB."""
_free_of: Callable[[Place], int] = itemgetter(1)


class DeviceChoice:
    """Orders devices for leases that need `need_mib` on each of theirs.

    `kind_of` returns the kind of a device: leases of several devices have devices of one kind. `everywhere` returns all devices of the
    pool; it is called only where the mix has asks for several devices.
    """

    __slots__ = ("_counts", "_everywhere", "_kind_of", "_mix", "_need_mib")

    def __init__(
        self,
        mix: AskMix,
        need_mib: int,
        *,
        kind_of: Callable[[str], str],
        everywhere: Callable[[], Iterable[Place]],
    ) -> None:
        self._mix = mix
        self._need_mib = need_mib
        self._kind_of = kind_of
        self._everywhere = everywhere
        self._counts: dict[tuple[str, int], int] | None = None  # by kind and MiB: devices that have so much free

    @property
    def is_even(self) -> bool:
        """Whether the lease spoils the same on all devices: no lease has asked, or all ask for what this one needs."""
        return not self._mix.weights or self._mix.only_mib == self._need_mib

    def best(self, fitting: Sequence[Place]) -> str | None:
        """Return the best of the devices, on each of which the lease fits; None if there is none."""
        if len(fitting) < 2:
            return fitting[0][0] if fitting else None
        mix, need_mib = self._mix, self._need_mib
        if self.is_even:
            return min(fitting, key=_free_of)[0]
        # What is spoilt depends on the free memory and the kind: the first device with the same stands for the others.
        if mix.several:
            alike: dict[tuple[str, int], Place] = {}
            for place in fitting:
                alike.setdefault((self._kind_of(place[0]), place[1]), place)
            return min(alike.values(), key=self.rank)[0]
        firsts = {free_mib: device_id for device_id, free_mib in reversed(fitting)}
        if len(firsts) == 1:
            return fitting[0][0]
        usable = mix.usable
        least = min([(usable(free_mib) - usable(free_mib - need_mib), free_mib) for free_mib in firsts])
        return firsts[least[1]]

    def best_set(self, fitting: Iterable[Place], count: int) -> tuple[str, ...] | None:
        """Return the best `count` devices of one kind, on each of which the lease fits; None if no kind has that many."""
        by_kind: dict[str, list[Place]] = {}
        for place in fitting:
            by_kind.setdefault(self._kind_of(place[0]), []).append(place)
        sets = [sorted(found, key=self.rank)[:count] for found in by_kind.values() if len(found) >= count]
        best = min(sets, key=lambda places: (self.spoilt(places), sum(map(_free_of, places))), default=None)
        return tuple(device_id for device_id, _ in best) if best is not None else None

    def rank(self, place: Place) -> tuple[int, int]:
        """Return what orders devices: the least comes first."""
        return self.spoilt((place,)), place[1]

    def spoilt(self, places: Sequence[Place]) -> int:
        """Return what is no more usable if the lease has these devices (of one kind, where it fits): MiB times the weight of the asks."""
        mix, need_mib = self._mix, self._need_mib
        spoilt = sum([mix.usable(free_mib) - mix.usable(free_mib - need_mib) for _, free_mib in places])
        for mib, devices, weight in mix.several:
            fewer = sum([free_mib >= mib > free_mib - need_mib for _, free_mib in places])
            if fewer:
                count = max(fewer, self._count(self._kind_of(places[0][0]), mib))  # some may be free only then
                spoilt += (count // devices - (count - fewer) // devices) * devices * mib * weight
        return spoilt

    def _count(self, kind: str, mib: int) -> int:
        """Return how many devices of the kind have so much free."""
        if self._counts is None:
            self._counts = {}
            amounts = {mib for mib, _, _ in self._mix.several}
            for device_id, free_mib in self._everywhere():
                for amount in amounts:
                    if free_mib >= amount:
                        key = self._kind_of(device_id), amount
                        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts.get((kind, mib), 0)


def device_choice(books: Books, lease: Lease, need_mib: int, everywhere: Callable[[], Iterable[Place]]) -> DeviceChoice:
    """Return what orders devices for a lease, by what its pool is asked for. `everywhere`: all devices that it may go to."""
    mix = books.forecasts.asks(lease.spec.pool)
    return DeviceChoice(mix, need_mib, kind_of=books.kind_of, everywhere=everywhere)
