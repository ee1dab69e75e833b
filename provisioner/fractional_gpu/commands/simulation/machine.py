"""On what `jupyter gpu simulate` runs sessions: one host, or several."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fractional_gpu.commands.simulation.load import percent, positive
from fractional_gpu.commands.terminal.errors import UsageError
from fractional_gpu.config import ConfigError, Settings, load
from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.core.units import parse_duration_ms, parse_memory_mib
from fractional_gpu.simulator.cluster import EngineDoor, WaitTerms
from fractional_gpu.simulator.fleet.placing import PlaceRule
from fractional_gpu.simulator.fleet.run import Way
from fractional_gpu.simulator.hosts import DoorRule
from fractional_gpu.simulator.load import Signs
from fractional_gpu.simulator.machine import Host, SwapSpeed

MOST_DEVICES = 8192
_USUAL_DEVICES = "8x80GiB"
_MOST_FALSE_PERCENT = 90
MOST_IN_A_HOST = 16  # GPUs: no host on sale has more
_DEVICES = re.compile(r"(\d{1,4})x(.{1,20})", re.ASCII)
_HOSTS = re.compile(r"\s*(\d{1,4}|\?)x\(([^()]*)\)", re.ASCII)
_FORM = (
    "COUNTx(COUNTxMEMORY) such as '4x(8x80GiB)' or '4x(8x80GiB),2x(6x80GiB,2x40GiB)' is, and with --find-devices '?x(8x80GiB)', "
    f"at most {MOST_DEVICES} GPUs in all"
)


def configure_machine(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say on what the sessions run."""
    machine = parser.add_argument_group("the machine")
    _configure_hosts(machine)
    _configure_swaps(machine)
    _configure_cells(machine)
    machine.add_argument(
        "--policy",
        metavar="FILE",
        help="a broker's configuration file (default: the pool that a broker has without one)",
    )


def _configure_hosts(host: argparse._ArgumentGroup) -> None:
    """Add the arguments about devices and hosts, and which host a session is given."""
    host.add_argument("--devices", metavar="NxSIZE", help=f"the GPUs, all in one host (default: {_USUAL_DEVICES})")
    host.add_argument(
        "--hosts",
        metavar="Nx(NxSIZE)",
        help="hosts with their GPUs, such as '4x(8x80GiB)' or '4x(8x80GiB),2x(6x80GiB,2x40GiB)'; with --find-devices '?x(8x80GiB)'",
    )
    host.add_argument(
        "--gpus-per-host",
        type=positive,
        default=MOST_IN_A_HOST,
        metavar="N",
        help=f"the most that --hosts may put into one host (default: {MOST_IN_A_HOST})",
    )
    host.add_argument(
        "--door",
        choices=[rule.value for rule in (*DoorRule, *EngineDoor)],
        help="how a session is given its host when it opens, all hosts on one clock: where it fits best, or where the most is free "
        "(default: fit); or as a job of an engine (Slurm, Kubernetes) that counts whole GPUs, static shards of a GPU, or the thousandths "
        "that each host's broker would still give away",
    )
    host.add_argument(
        "--place",
        choices=[rule.value for rule in PlaceRule],
        help="in the place of --door, for many hosts: all sessions are given their hosts beforehand, by chance, or in their order to the "
        "host with the fewest open sessions for each GPU, or with the least expected use; then each host runs by itself",
    )
    host.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="with --place or --door engine-count: so many hosts run at the same time (default: one for each core)",
    )


def _configure_swaps(host: argparse._ArgumentGroup) -> None:
    """Add the arguments about suspended state: where it goes, how fast, how often in vain."""
    host.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="of each host, for suspended state (default: the policy's size, or 1TiB)",
    )
    host.add_argument("--swap-fixed", default="300ms", metavar="TIME", help="of every swap (default: 300ms)")
    host.add_argument("--save-speed", default="1800MiB", metavar="SIZE", help="saved a second (default: 1800MiB)")
    host.add_argument("--restore-speed", default="4000MiB", metavar="SIZE", help="restored a second (default: 4000MiB)")
    host.add_argument(
        "--parallel-swaps", type=positive, default=1, metavar="N", help="swaps of a host at a time (default: 1)"
    )
    host.add_argument(
        "--failed-swaps", type=percent, default=0, metavar="PERCENT", help="of the swaps fail harmlessly (default: 0)"
    )


def _configure_cells(host: argparse._ArgumentGroup) -> None:
    """Add the arguments about what cells do to the machine: signs before them, contention, memory that grows."""
    host.add_argument(
        "--foresight",
        metavar="TIME",
        help="people give a sign so long before each GPU cell, as JupyterLab tells it (default: no signs)",
    )
    host.add_argument(
        "--false-signs",
        type=percent,
        default=0,
        metavar="PERCENT",
        help="of these signs no cell follows, at most 90 (default: 0)",
    )
    host.add_argument("--no-slowdown", action="store_true", help="busy cells on one device do not slow each other down")
    host.add_argument("--every-cell-asks", action="store_true", help="cells that touch no GPU wait for it, too")
    host.add_argument(
        "--request",
        type=percent,
        default=100,
        metavar="PERCENT",
        help="of its cap that a session is guaranteed, where the policy reserves by use (default: 100)",
    )
    host.add_argument(
        "--growth-patience",
        default="1m",
        metavar="TIME",
        help="a cell whose reservation does not grow for so long is out of memory; 0: at once (default: 1m)",
    )


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """What was said about the machine. `shapes` are the MiB of the GPUs of each host, or with `--find-devices` those of one host."""

    options: argparse.Namespace
    shapes: tuple[tuple[int, ...], ...]
    several: bool  # hosts, by --hosts
    settings: Settings | None
    way: Way  # how sessions are given their hosts, where no engine does that
    engine: EngineDoor | None = None  # what the engine that gives jobs their hosts knows of these

    @property
    def terms(self) -> WaitTerms:
        """The waits that the default pool allows."""
        if self.settings is None:
            return WaitTerms()
        pool = self.settings.first_pool
        return WaitTerms(target_ms=pool.wait_target, bound_milli=pool.wait_bound)

    def hosts(self, count: int | None = None) -> tuple[Host, ...]:
        """Return the hosts; with a count so many of the first shape, or one host with so many GPUs of the first size."""
        shapes = self.shapes
        if count is not None:
            shapes = shapes[:1] * count if self.several else ((shapes[0][0],) * count,)
        made = {shape: self._host(shape) for shape in dict.fromkeys(shapes)}
        return tuple(made[shape] for shape in shapes)

    def _host(self, sizes: Sequence[int]) -> Host:
        options, settings = self.options, self.settings
        devices = tuple(
            DeviceSpec(
                device_id=f"simulated-{number}",
                name=f"simulated-{mib}",
                memory_mib=mib,
                overhead_mib=settings.overhead_mib(mib, simulated=True) if settings is not None else 0,
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
        if options.host_memory is not None:
            budget_mib = parsed("--host-memory", parse_memory_mib, options.host_memory)
        return Host(
            devices=devices,
            pools=pools,
            host_memory_mib=budget_mib,
            swap=SwapSpeed(
                fixed_ms=parsed("--swap-fixed", parse_duration_ms, options.swap_fixed),
                save_mib_per_s=parsed("--save-speed", parse_memory_mib, options.save_speed),
                restore_mib_per_s=parsed("--restore-speed", parse_memory_mib, options.restore_speed),
            ),
            parallel_swaps=options.parallel_swaps,
            failed_swaps_percent=options.failed_swaps,
            seed=options.seed,
            signs=_signs(options),
            slowdown=not options.no_slowdown,
            every_cell_asks=options.every_cell_asks,
            request_percent=options.request,
            patience_ms=parsed("--growth-patience", parse_duration_ms, options.growth_patience),
        )


def _signs(options: argparse.Namespace) -> Signs:
    """Return what signs people give. Raises UsageError."""
    if options.foresight is None:
        if options.false_signs:
            raise UsageError("--false-signs needs --foresight TIME: without it people give no signs")
        return Signs()
    if options.false_signs > _MOST_FALSE_PERCENT:
        raise UsageError(
            f"--false-signs {options.false_signs} is not allowed; a whole number from 0 to {_MOST_FALSE_PERCENT} is"
        )
    foresight_ms = parsed("--foresight", parse_duration_ms, options.foresight)
    if not foresight_ms:
        raise UsageError(f"--foresight {options.foresight} is not allowed; a time such as 20s is")
    return Signs(foresight_ms=foresight_ms, false_percent=options.false_signs)


def usual_machine(options: argparse.Namespace) -> dict[str, object]:
    """Return what the options say that were left out about the machine, by the options' names."""
    said: dict[str, object] = {"devices": options.devices or _USUAL_DEVICES} if options.hosts is None else {}
    return said if options.place is not None else {**said, "door": options.door or DoorRule.FIT}


def _engine(options: argparse.Namespace) -> EngineDoor | None:
    """Return what the engine knows, where --door names one. Raises UsageError."""
    if options.door not in set(EngineDoor):
        return None
    door = EngineDoor(options.door)
    if options.hosts is None:
        raise UsageError(
            f"--door {door} needs several hosts, such as --hosts '4x(8x80GiB)': an engine chooses among them"
        )
    for option in ("find_devices", "usage", "meter"):
        if getattr(options, option, None):
            raise UsageError(
                f"--door {door} with --{option.replace('_', '-')} is not allowed: jobs wait in the engine's queue; leave one of the two out"
            )
    return door


def _way(options: argparse.Namespace) -> Way:
    """Return how sessions are given their hosts, by --door or by --place; behind an engine, how its hosts run. Raises UsageError."""
    if options.place is None and options.door in set(EngineDoor):
        cores = len(os.sched_getaffinity(0))
        return Way(seed=options.seed, processes=options.processes or cores)
    if options.place is None:
        if options.processes is not None:
            raise UsageError(
                f"--processes {options.processes} needs --place, by which each host runs by itself; with --door all hosts run on one "
                "clock, in one process"
            )
        return Way(rule=DoorRule(options.door or DoorRule.FIT))
    if options.door is not None:
        raise UsageError(
            f"--door {options.door} and --place {options.place} are two ways to give a session its host; say one of them"
        )
    if options.hosts is None:
        raise UsageError(
            f"--place {options.place} needs several hosts, such as --hosts '4x(8x80GiB)'; one host takes all sessions"
        )
    cores = len(os.sched_getaffinity(0))
    return Way(rule=PlaceRule(options.place), seed=options.seed, processes=options.processes or cores)


def read_machine(options: argparse.Namespace) -> MachineOptions:
    """Return what the options say about the machine. Raises UsageError, ConfigError."""
    settings, way = _policy(options.policy) if options.policy is not None else None, _way(options)
    engine = _engine(options)
    if options.hosts is None:
        sizes = _devices("--devices", options.devices or _USUAL_DEVICES)
        return MachineOptions(options, (tuple(sizes),), several=False, settings=settings, way=way)
    if options.devices is not None:
        raise UsageError("--devices is one host and --hosts are several; say one of them")
    searched = options.hosts.strip().startswith("?")
    if searched != options.find_devices:
        instead = "say a number of hosts such as '4x(8x80GiB)', or --find-devices" if searched else "say '?x(8x80GiB)'"
        raise UsageError(
            f"--hosts {options.hosts[:60]!r} {'without' if searched else 'with'} --find-devices is not allowed; {instead}"
        )
    shapes = tuple(_hosts(options.hosts, options.gpus_per_host))
    return MachineOptions(options, shapes, several=True, settings=settings, way=way, engine=engine)


def _hosts(text: str, most: int) -> list[tuple[int, ...]]:
    """Return the MiB of each GPU of each host from `4x(8x80GiB),2x(4x40GiB)`; of `?x(8x80GiB)` those of one host."""
    shapes: list[tuple[int, ...]] = []
    parts, at = text.strip(), 0
    while at < len(parts):
        match = _HOSTS.match(parts, at)
        end = match.end() if match is not None else 0
        if match is None or parts[end : end + 1] not in ("", ",") or (match[1] == "?" and (shapes or end < len(parts))):
            break
        shape, count = tuple(_devices("--hosts", match[2])), 1 if match[1] == "?" else int(match[1])
        if len(shape) > most:
            raise UsageError(
                f"--hosts {text[:60]!r} has {len(shape)} GPUs in a host; at most {most} are allowed: say more hosts with fewer GPUs, or "
                f"allow so many with --gpus-per-host {len(shape)}"
            )
        if not 0 < count * len(shape) <= MOST_DEVICES - sum(map(len, shapes)):
            break
        shapes += [shape] * count
        at = end + 1
    else:
        if shapes and not parts.endswith(","):
            return shapes
    raise UsageError(f"--hosts {text[:60]!r} is not allowed; {_FORM}")


def _devices(option: str, text: str) -> list[int]:
    """Return the MiB of each device from `8x80GiB` or `6x80GiB,2x40GiB`."""
    sizes: list[int] = []
    for part in text.split(","):
        match = _DEVICES.fullmatch(part.strip())
        count = int(match[1]) if match else 0
        if match is None or not 0 < count <= MOST_DEVICES - len(sizes):
            raise UsageError(
                f"{option} {text[:60]!r} is not allowed; COUNTxMEMORY such as 8x80GiB or 6x80GiB,2x40GiB is, at most "
                f"{MOST_DEVICES} in all"
            )
        sizes += [parsed(option, parse_memory_mib, match[2])] * count
    return sizes


def parsed(option: str, parse: Callable[[str], int], text: str) -> int:
    """Return what an option says. Raises UsageError."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _policy(path: str) -> Settings:
    """Read the broker's configuration file. Raises ConfigError."""
    try:
        return load(path)
    except ConfigError as error:
        raise ConfigError(f"--policy: {error}") from error
