"""The result of a search for how many devices or hosts are enough."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fractional_gpu.core.units import format_duration, format_memory, plural
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a search: one run per seed, each with the smallest number of devices or hosts that is enough for all seeds.

    `by_seed` has the smallest number for each seed alone. If the number of existing hosts limits the search, `of` is that number.
    """

    results: list[Result]
    by_seed: list[int]
    counted: str  # devices or hosts
    goal: Goal
    of: int | None = None

    @property
    def count(self) -> int:
        return self.results[0].hosts if self.counted == "hosts" else self.results[0].devices

    def sentence(self, baselines: "Sequence[Answer]" = ()) -> str:
        noun, seeds = self.counted.removesuffix("s"), ""
        counted = plural(self.count, noun) if self.of is None else f"{self.count} of {plural(self.of, noun)}"
        if len(self.by_seed) > 1:
            spread = "the same" if {*self.by_seed} == {self.count} else f"{min(self.by_seed)} to {self.count}"
            seeds = f" ({spread} over {len(self.by_seed)} seeds)"
        waits = [f"p{percent} waits within {format_duration(limit_ms)}" for percent, limit_ms in self.goal.waits()]
        if self.goal.p95_late_ms is not None:
            waits.append(f"a p95 lateness within {format_duration(self.goal.p95_late_ms)} for 95 % of the users")
        saved_mib = max(one.host_peak_mib for one in self.results)
        saved = f", with up to {format_memory(saved_mib)} saved on a host" if saved_mib else ""
        needed = "".join(f"; {one.results[0].name} needs {one.count}" for one in baselines)
        return f"{counted} suffice{'s' * (self.count == 1)}{seeds} for {' and '.join(waits)}{saved}{needed}."

    def figures(self) -> dict[str, object]:
        limits_ms = asdict(self.goal).items()
        return {
            "suffice": self.count,
            "of": self.of,
            "counted": self.counted,
            "by_seed": self.by_seed,
            "goal": {f"{name[:-2]}s": limit_ms / 1000 for name, limit_ms in limits_ms if limit_ms is not None},
        }
