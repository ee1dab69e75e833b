"""The machine simulated by `jupyter gpu simulate`: one or more hosts, how their use is metered, and devices that become unavailable."""

import re
from collections.abc import Sequence

from fractional_gpu.commands.simulation.scenario import Scenario
from fractional_gpu.commands.terminal.text import UsageError
from fractional_gpu.config import ConfigError, Pool, Settings, load
from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.core.units import parse_memory_mib
from fractional_gpu.simulator.engine_door import EngineDoor
from fractional_gpu.simulator.hosts import Door, DoorRule
from fractional_gpu.simulator.load import Signs
from fractional_gpu.simulator.machine import Host, SwapSpeed
from fractional_gpu.simulator.metering import Metering, Power, RunMeter
from fractional_gpu.simulator.traces import Session

MOST_DEVICES = 8192
_DEVICES = re.compile(r"(\d{1,4})x(.{1,20})", re.ASCII)
_HOSTS = re.compile(r"\s*(\d{1,4}|\?)x\(([^()]*)\)", re.ASCII)
_POWER = re.compile(r"(\d{1,4})-(\d{1,4})", re.ASCII)
_FORM = (
    "use COUNTx(COUNTxMEMORY) such as '4x(8x80GiB)' or '4x(8x80GiB),2x(6x80GiB,2x40GiB)', or '?x(8x80GiB)' with --find-devices; "
    f"at most {MOST_DEVICES} GPUs in total"
)


class MachineOptions:
    """Options that describe the machine. `shapes` lists the GPU sizes of each host, in MiB. A search may add copies of the last host.

    `limit` is the number of existing hosts, or None if a search may use any number.

    Raises UsageError or ConfigError.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.settings: Settings | None = None
        if scenario.policy is not None:
            try:
                self.settings = load(scenario.policy)
            except ConfigError as error:
                raise ConfigError(f"--policy: {error}") from error
        self.shapes = [tuple(_devices("--devices", scenario.devices))]
        self.several = scenario.hosts is not None  # --hosts was given
        if scenario.hosts is not None:
            self.shapes = _hosts(scenario.hosts)
        self.limit = len(self.shapes) if self.several and "?" not in (scenario.hosts or "") else None

    def door(self, hosts: Sequence[Host], trace: Sequence[Session]) -> Door:
        scenario = self.scenario
        if scenario.door is not DoorRule.SLURM_COUNT:
            return Door(hosts, trace, scenario.door, scenario.seed)
        pool = self.settings.first_pool if self.settings is not None else Pool()
        return EngineDoor(hosts, trace, target_ms=pool.wait_target, bound_milli=pool.wait_bound)

    def hosts(self, count: int | None = None) -> tuple[Host, ...]:
        shapes = self.shapes
        if count is not None and self.several:
            shapes = [*shapes[:count], *shapes[-1:] * (count - len(shapes))]
        elif count is not None:
            shapes = [(shapes[0][0],) * count]
        made = {shape: self._host(shape) for shape in dict.fromkeys(shapes)}
        return tuple(made[shape] for shape in shapes)

    def _host(self, sizes: Sequence[int]) -> Host:
        scenario, settings = self.scenario, self.settings
        devices = tuple(
            DeviceSpec(
                device_id=f"simulated-{number}",
                name=f"simulated-{mib}",
                memory_mib=mib,
                overhead_mib=settings.overhead_mib(simulated=True) if settings is not None else 0,
            )
            for number, mib in enumerate(sizes)
        )
        names = tuple(device.device_id for device in devices)
        pools: tuple[PoolSpec, ...] = (PoolSpec(name="default", devices=names),)
        budget_mib = 1 << 20
        if settings is not None:
            first = settings.first_pool.name
            pools = tuple(sorted(settings.pool_specs(devices), key=lambda pool: pool.name != first))
            amount, is_share = settings.host_memory
            budget_mib = budget_mib if is_share else amount
        if scenario.host_memory is not None:
            budget_mib = scenario.host_memory
        return Host(
            devices=devices,
            pools=pools,
            host_memory_mib=budget_mib,
            swap=SwapSpeed(
                fixed_ms=scenario.swap_fixed,
                save_mib_per_s=scenario.save_speed,
                restore_mib_per_s=scenario.restore_speed,
            ),
            parallel_swaps=scenario.parallel_swaps,
            failed_swaps_percent=scenario.failed_swaps,
            seed=scenario.seed,
            signs=Signs(foresight_ms=scenario.foresight or 0, false_percent=scenario.false_signs),
            slowdown=scenario.slowdown,
            every_cell_asks=scenario.every_cell_asks,
            request_percent=scenario.request,
            patience_ms=scenario.growth_patience,
        )


def _hosts(text: str) -> list[tuple[int, ...]]:
    """Parse hosts such as `4x(8x80GiB),2x(4x40GiB)` into GPU sizes per host, in MiB. `?x(8x80GiB)` (any number of hosts) gives one host."""
    shapes: list[tuple[int, ...]] = []
    parts, at = text.strip(), 0
    while at < len(parts):
        match = _HOSTS.match(parts, at)
        end = match.end() if match is not None else 0
        if match is None or parts[end : end + 1] not in ("", ",") or (match[1] == "?" and (shapes or end < len(parts))):
            break
        shape, count = tuple(_devices("--hosts", match[2])), 1 if match[1] == "?" else int(match[1])
        if not 0 < count * len(shape) <= MOST_DEVICES - sum(map(len, shapes)):
            break
        shapes += [shape] * count
        at = end + 1
    else:
        if shapes and not parts.endswith(","):
            return shapes
    raise UsageError(f"--hosts {text[:60]!r} is not valid; {_FORM}")


def _devices(option: str, text: str) -> list[int]:
    sizes: list[int] = []
    for part in text.split(","):
        match = _DEVICES.fullmatch(part.strip())
        count = int(match[1]) if match else 0
        if match is None or not 0 < count <= MOST_DEVICES - len(sizes):
            raise UsageError(
                f"{option} {text[:60]!r} is not valid; use COUNTxMEMORY such as 8x80GiB or 6x80GiB,2x40GiB, at most "
                f"{MOST_DEVICES} GPUs in total"
            )
        try:
            sizes += [parse_memory_mib(match[2])] * count
        except ValueError as error:
            raise UsageError(f"{option}: {error}") from error
    return sizes


def read_meter(scenario: Scenario, machine: MachineOptions) -> RunMeter | None:
    if not scenario.meter and scenario.usage is None:
        return None
    match = _POWER.fullmatch(scenario.power.strip())
    idle, peak = (int(match[1]), int(match[2])) if match else (1, 0)
    if idle > peak:
        raise UsageError(f"power={scenario.power[:40]!r} is not valid; use IDLE-PEAK in W, such as 75-700")
    settings = machine.settings
    return RunMeter(
        Metering(
            tariffs={pool.name: pool.tariff for pool in settings.pools} if settings is not None else {},
            power=Power(idle_mw=idle * 1000, peak_mw=peak * 1000),
            noise_percent=scenario.power_noise,
            seed=scenario.seed,
        )
    )


def check_pools(scenario: Scenario, trace: list[Session]) -> None:
    pool = next((session.pool for session in trace if session.pool), None)
    for name in ("baselines", "find_devices"):
        if pool is not None and getattr(scenario, name):
            raise UsageError(
                f"{name} only supports the default pool, but some sessions run in pool {pool!r}; leave out {name} or these sessions"
            )
