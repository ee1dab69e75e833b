"""Forecasts as plain data, and back. Only data of the right shape is accepted, so that a damaged file cannot influence decisions."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from fractional_gpu.core.forecasts.asks import MOST_SIZES
from fractional_gpu.core.forecasts.estimators import Scale

ForecastState = dict[str, object]
_Known = TypeVar("_Known")
_LARGEST = 1 << 53  # JSON readers elsewhere keep whole numbers up to here
_MOST_ITEMS = 100_000


def sparse(weights: Sequence[int]) -> list[int]:
    """Return what is not 0 as place, weight, place, weight ..."""
    return list(chain.from_iterable((place, weight) for place, weight in enumerate(weights) if weight))


class StateReader:
    """Reads one such state. Every method raises ValueError for data that `state` would not have written."""

    def __init__(self, state: object, version: int) -> None:
        self._state = self._mapping(state)
        if self._state.get("version") != version:
            raise ValueError(f"forecasts of version {self._state.get('version')!r} were given; allowed: {version}")

    def part(self, name: str) -> object:
        """Return a part by its name."""
        return self._state.get(name)

    def named(self, name: str, length: int) -> Iterator[tuple[str, list[object]]]:
        """Yield the items of a part, lists of that length, with their names."""
        for key, value in self._mapping(self._state.get(name)).items():
            yield key, self._items(value, length)

    def whole(self, value: object) -> int:
        """Return a whole number from 0 up; text of one, too."""
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 18:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
            raise ValueError(f"{value!r:.60} was given; allowed: a whole number from 0 to {_LARGEST}")
        return value

    def wholes(self, value: object) -> list[int]:
        """Return whole numbers."""
        return [self.whole(item) for item in self._items(value, None)]

    def numbers(self, value: object, length: int) -> list[float]:
        """Return so many numbers from 0 up."""
        found = []
        for item in self._items(value, length):
            if not isinstance(item, (int, float)) or isinstance(item, bool) or not 0 <= item <= _LARGEST:
                raise ValueError(f"{item!r:.60} was given; allowed: a number from 0 to {_LARGEST}")
            found.append(float(item))
        return found

    def couples(self, value: object) -> list[tuple[int, int]]:
        """Return whole numbers, two by two."""
        given = self.wholes(value)
        if len(given) % 2:
            raise ValueError(f"{len(given)} numbers were given; allowed: an even count")
        return list(zip(given[::2], given[1::2], strict=True))

    def sizes(self, value: object) -> dict[tuple[int, int], int]:
        """Return the weights of sizes: MiB, devices and weight, three by three."""
        given = self.wholes(value)
        if len(given) % 3 or not all(given) or len(given) > 3 * MOST_SIZES:
            raise ValueError(
                f"{given!r:.60} was given; allowed: at most {MOST_SIZES} sizes, three numbers from 1 up for each"
            )
        return {(mib, devices): weight for mib, devices, weight in zip(*[iter(given)] * 3, strict=True)}

    def weights(self, value: object, scale: Scale) -> list[int]:
        """Return what `sparse` made of weights on the scale."""
        found = [0] * scale.size
        for place, weight in self.couples(value):
            if place >= scale.size:
                raise ValueError(f"place {place} of a histogram was given; allowed: 0 to {scale.size - 1}")
            found[place] = weight
        return found

    def known(self, name: str, allowed: Mapping[str, _Known]) -> _Known:
        """Return the value of an allowed name."""
        if name not in allowed:
            raise ValueError(f"{name!r:.60} was given; allowed: {', '.join(allowed)}")
        return allowed[name]

    def _mapping(self, value: object) -> Mapping[str, object]:
        if not isinstance(value, dict) or len(value) > _MOST_ITEMS or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{value!r:.60} was given; allowed: an object such as the state of forecasts has there")
        return value

    def _items(self, value: object, length: int | None) -> list[object]:
        if not isinstance(value, list) or len(value) > _MOST_ITEMS or length not in (None, len(value)):
            allowed = "a list" if length is None else f"a list of {length}"
            raise ValueError(f"{value!r:.60} was given; allowed: {allowed}")
        return value
