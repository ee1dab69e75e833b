"""The settings of a broker as plain, checked integers: read from files, translated from the traits, and shown as an example.

Loading checks everything that does not depend on the machine's devices; `managed` and `pool_specs` check the rest.
"""

import grp
import json
import re
import stat
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_config_path
from traitlets import TraitError
from traitlets.config.loader import Config, LazyConfigValue, PyFileConfigLoader

from fractional_gpu.config import carbon, pools, values
from fractional_gpu.config.budgets import parse_budgets
from fractional_gpu.config.pools import ALL_KEYS, PoolSettings
from fractional_gpu.config.traits import GPUBroker
from fractional_gpu.config.values import ConfigError, config_error, did_you_mean
from fractional_gpu.core.metering.budgets import Budget
from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.core.units import format_fraction, restore_margin_mib

DRIVER_MIB = 300  # on each real device
_USUAL_FRACTION_MILLI = 250
# Part of a kernelspec's name, which Jupyter reads in lower case.
_POOL_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A broker's settings. Memory in MiB, durations in milliseconds, fractions in milli-GPU."""

    files: tuple[Path, ...]  # that were read; the last one wins
    state_dir: Path | None  # None: the folder that fractional_gpu.client.state_folder chooses
    ledger_limit_mib: int
    idle_exit_ms: int | None  # None: never
    hang_limit_ms: int | None  # None: never
    host_memory_mib: int | None  # either this
    host_memory_milli: int | None  # or this: thousandths of the machine's memory
    device_overhead_mib: int | None  # None: by the kind of device, see `overhead_mib`
    lock_timeout_ms: int
    gate_timeout_ms: int
    checkpoint_deadline_ms: int
    default_pool: str
    default_fraction_milli: int
    log_level: str
    devices: tuple[str, ...] | None  # references; None: all
    devices_where: str  # the key of `devices`, for errors that depend on the devices
    pools: tuple[PoolSettings, ...]
    account_of_unknown_uids: int | None = None  # a uid; None: each is a separate user
    seats_required: bool = False
    device_kind: str = ""  # "": NVIDIA's
    admin_group: str = ""
    admin_group_where: str = ""  # its key, for an error that depends on the host
    audit_file: Path | None = None  # None: where the ledger is
    audit_max_mib: int = 10  # of one file
    audit_files: int = 20  # finished ones that are kept
    audit_keep_ms: int | None = None  # None: for ever
    audit_required: bool = True
    on_empty: Path | None = None  # a program that is told of empty devices
    empty_after_ms: int = 300_000
    revocation_notice: Path | str | None = None  # a file, or a URL
    revocation_deadline_ms: int = 30_000
    revocation_drains: bool = False
    metrics_address: tuple[str, int] | None = None  # IP address and port; None: no listener
    metrics_public: bool = False
    budgets: tuple[Budget, ...] = ()
    metrics_users: bool = False
    carbon: float | Path | None = None  # grams for each kWh, or a file of them; None: not known
    usage_visible: str = "own"  # whose use users may see: own, group or all

    def admin_gid(self) -> int | None:
        """Return the id of the administrators' group; None if none is set. Raises ConfigError if the host has no such group."""
        if not self.admin_group:
            return None
        try:
            return grp.getgrnam(self.admin_group).gr_gid
        except KeyError:
            raise config_error(
                self.admin_group_where, self.admin_group, "this host has no such group; create it, or leave it empty"
            ) from None

    def host_budget_mib(self, total_mib: int) -> int:
        """Return the host memory for suspended state on a machine with `total_mib`, at most all of it."""
        if self.host_memory_mib is not None:
            return min(self.host_memory_mib, total_mib)
        return total_mib * (self.host_memory_milli or 0) // 1000

    def overhead_mib(self, memory_mib: int, *, simulated: bool) -> int:
        """Return the memory of a device with `memory_mib` that no lease may have.

        On a real device: what the driver takes, and the margin that the largest restore leaves free.
        """
        if self.device_overhead_mib is not None:
            return self.device_overhead_mib
        return 0 if simulated else DRIVER_MIB + restore_margin_mib(memory_mib)

    def managed(self, devices: Sequence[DeviceSpec]) -> tuple[DeviceSpec, ...]:
        """Return those of the host's `devices` (all, in the order of their numbers) that this broker manages.

        Raises ConfigError for a configured device that the host lacks.
        """
        if self.devices is None:
            return tuple(devices)
        found = [pools.find_devices(self.devices_where, one, devices) for one in self.devices]
        chosen = {device.device_id for some in found for device in some}
        return tuple(device for device in devices if device.device_id in chosen)

    def pool_specs(self, devices: Sequence[DeviceSpec]) -> tuple[PoolSpec, ...]:
        """Return the pools with their devices. `devices` are all of the host's, in the order of their numbers.

        Raises ConfigError for a device that is unknown or in two pools, and for a pool without devices, unless the host has none.
        """
        return pools.assign(self.pools, devices, self.managed(devices))


_PARSERS: Mapping[str, Callable[[object], Any]] = {
    "account_of_unknown_uids": values.account,
    "state_dir": values.state_dir,
    "ledger_limit": values.file_size,
    "idle_exit": values.duration(least_ms=1000, word="never"),
    "hang_limit": values.duration(least_ms=1000, word="never"),
    "host_memory": values.host_memory,
    "lock_timeout": values.duration(least_ms=10),
    "gate_timeout": values.duration(least_ms=10),
    "checkpoint_deadline": values.duration(least_ms=1000),
    "log_level": values.log_level,
    "devices": values.device_references,
    "audit_file": values.audit_file,
    "audit_max_size": values.file_size,
    "audit_files": values.whole_number(1, 10_000),
    "audit_keep": values.duration(least_ms=3_600_000, word="forever"),
    "on_empty": values.program,
    "empty_after": values.duration(),
    "revocation_notice": values.notice_source,
    "revocation_deadline": values.duration(least_ms=1000),
    "metrics_address": values.metrics_address,
    "carbon": carbon.parse_setting,
    "usage_visible": values.usage_visible,
}


def translate(traits: GPUBroker, where: Callable[[str], str], files: tuple[Path, ...] = ()) -> Settings:
    """Return the settings; `where` names a trait and the place that set it. Raises ConfigError."""

    def parsed(name: str, parse: Callable[[object], Any]) -> Any:  # noqa: ANN401 -- whatever the parser returns
        value = getattr(traits, name)
        try:
            return parse(value)
        except ValueError as error:
            raise config_error(where(name), value, str(error)) from None

    plain = {name: parsed(name, parse) for name, parse in _PARSERS.items()}
    host, is_share = plain["host_memory"]
    configured = _pools(traits, where("pools"))
    default_pool = _default_pool(traits.default_pool, configured, where)
    fraction = parsed("default_fraction", values.fraction) if traits.default_fraction is not None else None
    return Settings(
        files=files,
        state_dir=plain["state_dir"],
        ledger_limit_mib=plain["ledger_limit"],
        idle_exit_ms=plain["idle_exit"],
        hang_limit_ms=plain["hang_limit"],
        host_memory_mib=None if is_share else host,
        host_memory_milli=host if is_share else None,
        device_overhead_mib=parsed("device_overhead", values.memory) if traits.device_overhead is not None else None,
        lock_timeout_ms=plain["lock_timeout"],
        gate_timeout_ms=plain["gate_timeout"],
        checkpoint_deadline_ms=plain["checkpoint_deadline"],
        default_pool=default_pool.name,
        default_fraction_milli=_default_fraction(fraction, default_pool, where("default_fraction")),
        log_level=plain["log_level"],
        devices=plain["devices"],
        devices_where=where("devices"),
        pools=configured,
        account_of_unknown_uids=plain["account_of_unknown_uids"],
        seats_required=traits.seats_required,
        device_kind=traits.device_kind,
        admin_group=traits.admin_group,
        admin_group_where=where("admin_group"),
        audit_file=plain["audit_file"],
        audit_max_mib=plain["audit_max_size"],
        audit_files=plain["audit_files"],
        audit_keep_ms=plain["audit_keep"],
        audit_required=traits.audit_required,
        on_empty=plain["on_empty"],
        empty_after_ms=plain["empty_after"],
        revocation_notice=plain["revocation_notice"],
        revocation_deadline_ms=plain["revocation_deadline"],
        revocation_drains=traits.revocation_drains,
        metrics_address=_metrics_address(traits, plain["metrics_address"], where("metrics_address")),
        metrics_public=traits.metrics_public,
        budgets=parse_budgets(where("budgets"), traits.budgets),
        metrics_users=traits.metrics_users,
        carbon=plain["carbon"],
        usage_visible=plain["usage_visible"],
    )


def _metrics_address(traits: GPUBroker, address: tuple[str, int] | None, where: str) -> tuple[str, int] | None:
    if address is not None and not traits.metrics_public and not ip_address(address[0]).is_loopback:
        raise config_error(
            where,
            traits.metrics_address,
            "other machines reach this address; use a loopback one such as '127.0.0.1:9464', or set "
            "c.GPUBroker.metrics_public = True to let every client that reaches it read the totals",
        )
    return address


def _pools(traits: GPUBroker, where: str) -> tuple[PoolSettings, ...]:
    if not traits.pools:
        raise config_error(where, traits.pools, "there must be a pool, such as {'default': {}}")
    for name in traits.pools:
        if not _POOL_NAME.fullmatch(name):
            raise config_error(
                f"{where}[{name!r}]",
                traits.pools[name],
                "a pool's name has 1 to 63 small letters, digits, '-', '_' and '.', with a letter or digit at either end",
            )
    configured = tuple(pools.parse_pool(where, name, raw) for name, raw in traits.pools.items())
    if len(greedy := [pool.name for pool in configured if pool.devices is None]) > 1:
        raise config_error(
            f"{where}[{greedy[1]!r}]['devices']",
            "all",
            f"pool {greedy[0]!r} has 'all' already (it is the default); list the devices of all pools but one",
        )
    return configured


def _default_pool(name: str, configured: Sequence[PoolSettings], where: Callable[[str], str]) -> PoolSettings:
    by_name = {pool.name: pool for pool in configured}
    if name and name not in by_name:
        raise config_error(where("default_pool"), name, f"there is no such pool; allowed: {', '.join(by_name)}")
    if not name and "default" not in by_name and len(by_name) > 1:
        raise ConfigError(
            f"{where('pools')}: no pool is called 'default'; set c.GPUBroker.default_pool to one of {', '.join(by_name)}"
        )
    return by_name.get(name or "default", configured[0])


def _default_fraction(milli: int | None, pool: PoolSettings, where: str) -> int:
    offered = pool.fractions_milli
    if milli is None:
        return _USUAL_FRACTION_MILLI if not offered or _USUAL_FRACTION_MILLI in offered else offered[0]
    if offered and milli not in offered:
        listed = ", ".join(format_fraction(one) for one in offered)
        raise config_error(where, format_fraction(milli), f"pool {pool.name!r} does not offer it; it offers: {listed}")
    return milli


# -- loading -----------------------------------------------------------------------------------------------------------
# Finding and reading `jupyter_gpu_config.py`.
#
# - Without an explicit file, every file of that name along Jupyter's configuration path is read, the system's first and the
#   user's last, so that the user's wins. An explicit file is the only one, and it must be there.
# - A setting that is in no file has its default; the command line wins over the files.
# - An unknown class or setting is an error with a suggestion; traitlets would only warn.
# - A configuration is a program: a file that every user may write to is not run.


CONFIG_NAME = "jupyter_gpu_config.py"
_SECTION = GPUBroker.__name__


def load(
    config_file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    origin: str = "the command line",
) -> Settings:
    """Return the settings from the files and from `overrides` (names of traits; None: not given), which come from `origin`.

    Raises ConfigError that names the file, the line or key, the value and what is allowed.
    """
    files = _search() if config_file is None else (Path(config_file).absolute(),)
    traits, source = GPUBroker(), dict[str, str]()
    for file in files:
        _apply(traits, source, _read(file), str(file))
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    _apply(traits, source, given, origin)
    return translate(traits, lambda name: _where(source.get(name), name), files)


def _where(source: str | None, name: str) -> str:
    return f"{source}: c.{_SECTION}.{name}" if source else f"c.{_SECTION}.{name}"


def _search() -> tuple[Path, ...]:
    """Return the files along Jupyter's path, least important first."""
    try:
        folders = jupyter_config_path()
    except RuntimeError as error:  # this user has no home folder
        raise ConfigError(f"{CONFIG_NAME} cannot be looked for: {error} Set HOME to a folder of your own") from error
    candidates = dict.fromkeys(Path(folder) / CONFIG_NAME for folder in reversed(folders))
    return tuple(file for file in candidates if _is_there(file))


def _is_there(file: Path) -> bool:
    """Return whether the file exists. Ignore a folder without permission, as Jupyter does."""
    try:
        return file.exists()
    except PermissionError:
        return False


def _read(file: Path) -> Mapping[str, Any]:
    """Run the file and return what it set of GPUBroker. Raises ConfigError with the line that failed."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error.strerror}; check its path") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"the configuration file {file} is not a regular file; check its path")
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"the configuration file {file} can be written by every user, so it is not run; chmod o-w {file}"
        )
    try:
        config: Config = PyFileConfigLoader(file.name, path=str(file.absolute().parent)).load_config()
    except SyntaxError as error:
        raise ConfigError(f"{error.filename or file}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # the file is a program: it may raise anything, or call exit()
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).name == file.name
        ]
        line = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{file}{line}: {type(error).__name__}: {error}") from error
    for section in config:
        if section != _SECTION:
            raise ConfigError(f"{file}: c.{section} is unknown here; {did_you_mean(section, [_SECTION])}")
    section_config: Mapping[str, Any] = config[_SECTION]
    return section_config


def _apply(traits: GPUBroker, source: dict[str, str], given: Mapping[str, Any], origin: str) -> None:
    """Set the given values. Raises ConfigError for an unknown name or a value of the wrong type."""
    known = GPUBroker.class_traits(config=True)
    for name, raw in given.items():
        where = _where(origin, name)
        if name not in known:
            raise ConfigError(f"{where} is unknown; {did_you_mean(name, known)}")
        value = raw.get_value(getattr(traits, name)) if isinstance(raw, LazyConfigValue) else raw
        try:
            setattr(traits, name, value)
        except TraitError:
            example = known[name].metadata.get("example")
            raise config_error(where, value, f"expected {known[name].info()}, for example {example!r}") from None
        source[name] = origin


# -- example -----------------------------------------------------------------------------------------------------------
# Generates an example configuration file from the help of the settings, so that it always matches them.
#
# As in other files that Jupyter generates, `## ` begins help and `# ` begins a disabled setting.


_WIDTH = 100
_HEAD = """\
# Configuration of the broker that shares the GPUs of this machine among Jupyter kernels.
# Put it as jupyter_gpu_config.py into a folder that `jupyter --paths` lists under "config", or name it with --config.
# Sizes are written like 20GiB, durations like 30s, 5m or 2h, fractions of a GPU like 1/4, 0.25 or 250m.

c = get_config()  # noqa
"""


def example_config() -> str:
    """Return the text of a file in which every setting is explained and commented out."""
    parts = [_HEAD]
    for name, trait in sorted(GPUBroker.class_traits(config=True).items()):
        parts.append(_pools_example(trait.help) if name == "pools" else _setting(name, trait))
    return "\n".join(parts)


def _setting(name: str, trait: Any) -> str:  # noqa: ANN401 -- traitlets' traits are generic in what they hold
    default = f"Default: {_literal(trait.default())}"
    return f"{_comment(trait.help)}## {default}\n# c.GPUBroker.{name} = {_literal(trait.metadata['example'])}\n"


def _pools_example(text: str) -> str:
    lines = [_comment(text) + "# c.GPUBroker.pools = {", '#     "default": {']
    for key, rule in ALL_KEYS.items():
        lines += textwrap.wrap(rule.help, _WIDTH, initial_indent="##         ", subsequent_indent="##         ")
        lines.append(f'#         "{key}": {_literal(rule.default)},  # or {_literal(rule.example)}')
    return "\n".join([*lines, "#     },", "# }"]) + "\n"


def _comment(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _WIDTH, initial_indent="## ", subsequent_indent="## ") + "\n"


def _literal(value: object) -> str:
    """Return Python source, with double quotes as in the rest of the file."""
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value)
