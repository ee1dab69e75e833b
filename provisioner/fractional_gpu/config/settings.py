"""Declares each setting of the broker once, with its parser, default, example and help.

- If no file is given, every `jupyter_gpu_config.py` on Jupyter's configuration path is read, from the system's to the user's, so that the
  user's values take precedence. The command line overrides all files.
- An unknown class or setting is reported as an error, with a suggestion, whereas traitlets would only issue a warning.
- A configuration file is a program, so it is not run if any user can write to it.
- Loading checks everything that does not depend on the machine's devices. The rest is checked by `managed` and `pool_specs`.
"""

import grp
import json
import os
import stat
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_config_path
from traitlets import HasTraits
from traitlets.config.loader import Config, LazyConfigValue, PyFileConfigLoader

from fractional_gpu.config import carbon, pools, values
from fractional_gpu.config.budgets import parse_budgets
from fractional_gpu.config.model_servers import parse_yielders
from fractional_gpu.config.pools import POOL_KEYS, Pool, parse_pools
from fractional_gpu.config.values import ConfigError, Setting, config_error, did_you_mean, settings_of
from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.core.units import RESTORE_MARGIN_MIB, format_fraction

DRIVER_MIB = 300  # for each real device
_USUAL_FRACTION_MILLI = 250
SECTION = "GPUBroker"


class Settings(HasTraits):
    """The settings of a broker.

    Memory is in MiB, durations are in ms, and fractions in milli-GPU. Each setting's help explains what None means. `files` lists the files
    that were read.
    """

    # fmt: off
    state_dir = Setting(
        values.path("/var/lib/jupyter-gpu", "~/.local/state/jupyter-gpu"), "", "/var/lib/jupyter-gpu",
        help="The folder for the ledger (the broker's database): an absolute path on a local disk, private to the broker. If this is "
        "empty, a system service uses /var/lib/jupyter-gpu, and any other broker a folder per host and socket in the user's state folder "
        "(~/.local/state/jupyter-gpu), or in /var/tmp/jupyter-gpu-UID if the state folder is on a network filesystem.",
    )
    ledger_limit = Setting(
        values.file_size, "4GiB", "16GiB",
        help="The maximum size of the ledger on disk, such as '16GiB'. Beyond it, the broker deletes the oldest history before its usual "
        "90 days are up. It only deletes usage records before their usual 400 days are up when no history is left. Data that kernels "
        "depend on is always written.",
    )
    idle_exit = Setting(
        values.or_word("never", values.duration(least_ms=1000)), "10m", "never",
        help="The broker stops when it has had no requests and no leases for this long, such as '30m'. If 'never', it keeps running; use "
        "that for a broker that runs as a service.",
    )
    hang_limit = Setting(
        values.or_word("never", values.duration(least_ms=1000)), "30s", "1m",
        help="A broker whose event loop hangs for this long writes its threads' stacks to its log and exits. The next program that "
        "needs it starts it again, and no kernel loses its state. If 'never', it does not exit.",
    )
    host_memory = Setting(
        values.host_memory, "50%", "64GiB",
        help="The host memory that all suspended kernels together may use for their GPU state: a share of the machine's memory, "
        "such as '50%', or a size, such as '64GiB'. If 0, no kernel is suspended.",
    )
    page_out_after = Setting(
        values.or_word("never", values.duration(least_ms=1000)), "never", "10m",
        help="How long after a kernel is suspended its state is moved to the machine's swap space, where it does not count against "
        "host_memory. The kernel then takes longer to resume. This needs root and swap space. If 'never', the state stays in memory.",
    )
    device_overhead = Setting(
        values.optional(values.memory), None, "500MiB",
        help="The memory on each device that no kernel may reserve. The driver needs it, and so do restores: a restore onto a full "
        "device kills the process. If None, this is 556MiB on real devices and 0 on simulated ones.",
    )
    lock_timeout = Setting(
        values.duration(least_ms=10), "2s", "5s",
        help="How long to wait for a kernel's GPU work to finish when suspending it. If it takes longer, the kernel is not suspended "
        "and stays on its device.",
    )
    gate_timeout = Setting(
        values.duration(least_ms=10), "2s", "5s",
        help="How long to wait for the extension of a kernel that is being suspended to respond, or to reconnect after the broker starts. "
        "After this time, the kernel is suspended only if it has not used its device for a while, or is preempted.",
    )
    checkpoint_deadline = Setting(
        values.duration(least_ms=1000), "10m", "20m",
        help="How long one checkpoint or restore may take. After this time, the broker assumes that the checkpoint worker has hung.",
    )
    default_pool = Setting(
        values.text, "", "default",
        help="The pool for kernels whose kernelspec does not name one. If empty, this is the pool called 'default', or the only pool.",
    )
    default_fraction = Setting(
        values.optional(values.fraction), None, "1/2",
        help="The fraction of a GPU for kernels whose kernelspec does not name one, such as '1/2', 0.5 or '500m'. If None, 1/4 if "
        "the default pool offers that, otherwise the pool's smallest fraction.",
    )
    log_level = Setting(
        values.log_level, "INFO", "DEBUG",
        help="The lowest level of messages written to the log: DEBUG, INFO, WARNING or ERROR.",
    )
    devices = Setting(
        values.device_references, "all", [0, 1],
        help="The devices that this broker manages: 'all', or a list of device numbers, UUIDs or prefixes of UUIDs. It does not touch "
        "other devices.",
    )
    device_kind = Setting(
        values.text, "", "example",
        help="The kind of device that this broker manages: empty for NVIDIA GPUs, or the name of a kind that an installed package "
        "provides (docs/extending.md).",
    )
    admin_group = Setting(
        values.text, "", "gpu-admins",
        help="An operating system group whose members are administrators, like root and the broker's own user: they can see "
        "and control all users' kernels and drain devices. If this is empty, no group has these rights.",
    )
    account_of_unknown_uids = Setting(
        values.account, "", "nobody",
        help="A user of this machine that all uids without a passwd entry count as, for limits, shares and budgets. Subordinate uids count "
        "as their owner in /etc/subuid instead. Name an account that nobody uses in person, because that user can see the charges. If this "
        "is empty, each of these uids counts as a separate user.",
    )
    seats_required = Setting(
        values.boolean, False, True,
        help="Refuse kernels that have no seat from a hub, for all users. A hub that runs the broker sets this.",
    )
    audit_file = Setting(
        values.path("/var/log/jupyter-gpu/audit.jsonl"), "", "/var/log/jupyter-gpu/audit.jsonl",
        help="The absolute path of the audit log, which records administrators' actions. If this is empty, it is audit.jsonl in the "
        "ledger's folder.",
    )
    audit_max_size = Setting(
        values.file_size, "10MiB", "100MiB",
        help="The maximum size of an audit log file; beyond that, a new file is started.",
    )
    audit_files = Setting(
        values.whole_number(1, 10_000), 20, 100,
        help="How many finished audit log files to keep; older ones are removed.",
    )
    audit_keep = Setting(
        values.or_word("forever", values.duration(least_ms=3_600_000)), "365d", "90d",
        help="How long to keep audit log entries, such as '90d', or 'forever'. Entries may be kept up to a quarter longer, because only "
        "whole files are removed, and each covers up to a quarter of this time.",
    )
    audit_required = Setting(
        values.boolean, True, False,
        help="Refuse administrators' actions while the audit log cannot be written, for example because the disk is full. If "
        "False, they are carried out, and the missing entries go to the broker's log.",
    )
    revocation_notice = Setting(
        values.notice_source, "", "/run/revoked",
        help="Where to look for a notice that this host is going away: the absolute path of a file, or a URL on 169.254.169.254, the "
        "address of cloud metadata services (AWS: http://169.254.169.254/latest/meta-data/spot/instance-action; Google: "
        "http://169.254.169.254/computeMetadata/v1/instance/preempted). The broker checks it every 2 s. When a notice appears, all users "
        "are told to save to disk; when it disappears, they are told that it was withdrawn. If this is empty, the broker checks nothing.",
    )
    revocation_drains = Setting(
        values.boolean, False, True,
        help="With revocation_notice: also suspend all kernels that can be suspended before the deadline, as `jupyter gpu drain "
        "--all --deadline` does. Use it if the host's memory is saved when it goes away (hibernation, snapshots). Otherwise "
        "suspended kernels are lost with the host and can no longer save to disk, while kernels on a GPU can.",
    )
    revocation_deadline = Setting(
        values.duration(least_ms=1000), "30s", "2m",
        help="How long after a notice the host is expected to go away, if the notice does not say when.",
    )
    cull_idle_after = Setting(
        values.or_word("never", values.duration(least_ms=1000)), "never", "7d",
        help="End kernels that hold GPU state and have been idle for this long, after a warning. Their variables are lost. If 'never', "
        "they are kept. If this or cull_above is set, the idle cullers of Jupyter and JupyterHub spare kernels that hold GPU state "
        "(docs/hub.md).",
    )
    cull_above = Setting(
        values.whole_number(1, 100), 100, 90,
        help="If suspended kernels fill more than this percentage of host_memory, end those that have been idle longest, after a warning. "
        "If 100, none are ended.",
    )
    cull_warning = Setting(
        values.duration(), "15m", "1h",
        help="How long before ending a kernel the broker warns its user, in the notebook and the status. Running a cell saves the kernel.",
    )
    yielders = Setting(
        parse_yielders, [], ["ollama", "comfyui=http://127.0.0.1:8189"],
        help="Model servers on this machine that release their GPU memory when a kernel of the same user waits for it: 'ollama', "
        "'comfyui', 'llama-swap' or 'vllm', with '=URL' for a non-standard port (docs/one-card.md).",
    )
    yield_for_everyone = Setting(
        values.boolean, False, True,
        help="Whether the `yielders` servers also release memory for other users' kernels. They need this if they run as system services.",
    )
    metrics_address = Setting(
        values.metrics_address, "", "127.0.0.1:9464",
        help="An IP address and a port at which Prometheus can read the metrics. If this is empty, only the broker's socket serves "
        "them. Every program that can reach the address can read the totals.",
    )
    metrics_public = Setting(
        values.boolean, False, True,
        help="Allow a metrics_address that other machines can reach. If False, only a loopback address such as 127.0.0.1 is "
        "allowed.",
    )
    budgets = Setting(
        parse_budgets, [], [{"user": "*", "limit": "40 GPU hours", "per": "month"}],
        help="How much users and groups may use: a list of {'user' or 'group': a name, or '*' for everyone, 'limit': an amount such "
        "as '40 GPU hours', '100 EUR' or '12 kWh', 'per': 'day', 'week' or 'month' (calendar periods), 'hour' (the last 60 "
        "minutes), or 'rolling 30d', and 'pools': the pools that count (default: all)}. The pool's over_budget sets what happens "
        "when a budget is used up.",
    )
    metrics_users = Setting(
        values.boolean, False, True,
        help="Also publish each user's usage and charges as metrics. User names are personal data: every program that can reach "
        "metrics_address can read them. On the broker's socket, only administrators can. Up to 256 users are named for each pool, and all "
        "others are added up.",
    )
    carbon = Setting(
        carbon.parse_setting, None, 350,
        help="The carbon intensity used in reports: grams of CO2 per kWh, or the path of a CSV file with the columns time and "
        "g_per_kwh and one line per hour. If None, reports omit carbon figures. Nothing is fetched over the network.",
    )
    usage_visible = Setting(
        values.one_of("own", "group", "all"), "own", "group",
        help="Whose usage and costs users may see: 'own'; 'group': also the totals of each user in their groups; 'all': the totals "
        "of every user. A notebook's name is only shown to administrators and to its own user.",
    )
    pools = Setting(
        parse_pools, {"default": {}}, None,
        help="The pools: groups of devices that share one policy. Keys that are left out keep their defaults.",
    )

    # fmt: on

    def __init__(self, written: Mapping[str, tuple[object, str]], files: tuple[Path, ...] = ()) -> None:
        """Parse the configured values, each of which is paired with its origin. Raises ConfigError."""
        super().__init__()
        self.files = files
        self._origins = {name: origin for name, (_, origin) in written.items()}
        for name, (value, _) in written.items():
            try:
                setattr(self, name, value)
            except ValueError as error:
                raise config_error(self.where(name), value, error) from None
        by_name = {pool.name: pool for pool in self.pools}
        if self.default_pool and self.default_pool not in by_name:
            problem = f"there is no such pool; choose one of: {', '.join(by_name)}"
            raise config_error(self.where("default_pool"), self.default_pool, problem)
        if not self.default_pool and "default" not in by_name and len(by_name) > 1:
            problem = f"no pool is called 'default'; set c.GPUBroker.default_pool to one of {', '.join(by_name)}"
            raise ConfigError(f"{self.where('pools')}: {problem}")
        offered, milli = self.first_pool.fractions, self.default_fraction
        if milli is not None and offered and milli not in offered:
            problem = f"pool {self.first_pool.name!r} does not offer this fraction; it offers: {', '.join(map(format_fraction, offered))}"
            raise config_error(self.where("default_fraction"), format_fraction(milli), problem)
        if self.metrics_address is not None and not self.metrics_public:
            address = self.metrics_address[0]
            if not ip_address(address).is_loopback:
                raise config_error(
                    self.where("metrics_address"),
                    written["metrics_address"][0],
                    "other machines can reach this address; use a loopback address such as '127.0.0.1:9464', or set "
                    "c.GPUBroker.metrics_public = True to let every client that can reach it read the totals",
                )

    def where(self, name: str) -> str:
        """Return the setting's name and the origin of its value, for error messages."""
        origin = self._origins.get(name)
        return f"{origin}: c.{SECTION}.{name}" if origin else f"c.{SECTION}.{name}"

    @property
    def first_pool(self) -> Pool:
        """The pool for kernels that do not name one."""
        return next((pool for pool in self.pools if pool.name == (self.default_pool or "default")), self.pools[0])

    @property
    def first_fraction(self) -> int:
        """The fraction for kernels that do not name one, in milli-GPU."""
        offered = self.first_pool.fractions
        if self.default_fraction is not None:
            return self.default_fraction
        return _USUAL_FRACTION_MILLI if not offered or _USUAL_FRACTION_MILLI in offered else offered[0]

    @property
    def culls_idle(self) -> bool:
        """Whether the broker ends idle kernels that hold GPU state."""
        return self.cull_idle_after is not None or self.cull_above < 100

    def admin_gid(self) -> int | None:
        """Return the gid of the administrators' group, or None if none is configured. Raises ConfigError if the group does not exist."""
        if not self.admin_group:
            return None
        try:
            return grp.getgrnam(self.admin_group).gr_gid
        except KeyError:
            problem = "this host has no such group; create it, or leave the setting empty"
            raise config_error(self.where("admin_group"), self.admin_group, problem) from None

    def host_budget_mib(self, total_mib: int) -> int:
        """Return how much of the machine's memory suspended state may use, in MiB. This is never more than the machine's total."""
        amount, is_share = self.host_memory
        return total_mib * amount // 1000 if is_share else min(amount, total_mib)

    def overhead_mib(self, *, simulated: bool) -> int:
        """Return how much of a device's memory leases cannot use, in MiB.

        This covers the driver's own memory, and the margin that must stay free so that a kernel can be restored.
        """
        if self.device_overhead is not None:
            return self.device_overhead
        return 0 if simulated else DRIVER_MIB + RESTORE_MARGIN_MIB

    def managed(self, devices: Sequence[DeviceSpec]) -> tuple[DeviceSpec, ...]:
        """Return the devices this broker manages, in order of their numbers. `devices` lists all the host's devices. Raises ConfigError."""
        if self.devices is None:
            return tuple(devices)
        found = [pools.find_devices(self.where("devices"), one, devices) for one in self.devices]
        chosen = {device.device_id for some in found for device in some}
        return tuple(device for device in devices if device.device_id in chosen)

    def pool_specs(self, devices: Sequence[DeviceSpec]) -> tuple[PoolSpec, ...]:
        """Return the pools with their devices. `devices` lists all the host's devices, in order of their numbers.

        Raises ConfigError.
        """
        return pools.assign(self.pools, self.where("pools"), devices, self.managed(devices))


SETTINGS = settings_of(Settings)
CONFIG_NAME = "jupyter_gpu_config.py"


def load(
    config_file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    origin: str = "the command line",
) -> Settings:
    """Load the settings from the files and from `overrides`. For error messages, `origin` says where the overrides come from.

    Overrides that are None are ignored. Raises ConfigError.
    """
    files = _search() if config_file is None else (Path(config_file).absolute(),)
    written: dict[str, tuple[object, str]] = {}
    for file in files:
        _collect(written, _read(file), str(file))
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    _collect(written, given, origin)
    return Settings(written, files)


def _search() -> tuple[Path, ...]:
    """Return the configuration files on Jupyter's configuration path, in increasing order of precedence."""
    try:
        folders = jupyter_config_path()
    except RuntimeError as error:  # this user has no home folder
        raise ConfigError(f"cannot search for {CONFIG_NAME}: {error} Set HOME to a folder that you own") from error
    candidates = dict.fromkeys(Path(folder) / CONFIG_NAME for folder in reversed(folders))
    # Like Jupyter, treat a folder without permission as empty. `Path.exists` would raise an error.
    return tuple(file for file in candidates if os.path.exists(file))  # noqa: PTH110


def _read(file: Path) -> Mapping[str, Any]:
    """Run the configuration file and return its GPUBroker settings. Raises ConfigError with a message that names the failing line."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error.strerror}; check its path") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"the configuration file {file} is not a regular file; check its path")
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"the configuration file {file} is writable by every user, so it was not run; run chmod o-w {file}"
        )
    try:
        config: Config = PyFileConfigLoader(file.name, path=str(file.absolute().parent)).load_config()
    except SyntaxError as error:
        raise ConfigError(f"{error.filename or file}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # the file is a program, so it may raise anything or call exit()
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).name == file.name
        ]
        line = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{file}{line}: {type(error).__name__}: {error}") from error
    for section in config:
        if section != SECTION:
            raise ConfigError(f"{file}: c.{section} is unknown; {did_you_mean(section, [SECTION])}")
    section_config: Mapping[str, Any] = config[SECTION]
    return section_config


def _collect(written: dict[str, tuple[object, str]], given: Mapping[str, Any], origin: str) -> None:
    """Add the given values to `written`, along with their origin. Raises ConfigError if a name is unknown."""
    for name, raw in given.items():
        if name not in SETTINGS:
            raise ConfigError(f"{origin}: c.{SECTION}.{name} is unknown; {did_you_mean(name, SETTINGS)}")
        before = written[name][0] if name in written else SETTINGS[name].default_value
        # A file may also change an earlier value, as in `c.GPUBroker.pools.update(...)`.
        written[name] = (raw.get_value(before) if isinstance(raw, LazyConfigValue) else raw, origin)


# The example configuration file is generated from the help of the settings, so that it always matches them. As in other files that Jupyter
# generates, `## ` begins help and `# ` begins a disabled setting.


_WIDTH = 100
_HEAD = """\
# Configuration of the broker that shares this machine's GPUs among Jupyter kernels.
# Save it as jupyter_gpu_config.py in a folder that `jupyter --paths` lists under "config", or pass its path with --config.
# Sizes are written like 20GiB, durations like 30s, 5m or 2h, fractions of a GPU like 1/4, 0.25 or 250m.

c = get_config()  # noqa
"""


def example_config() -> str:
    """Return a configuration file in which every setting is explained and commented out."""
    parts = [_HEAD]
    for name, setting in sorted(SETTINGS.items()):
        if name == "pools":
            parts.append(_pools_example(setting.help))
        else:
            default, example = _literal(setting.default_value), _literal(setting.example)
            parts.append(f"{_comment(setting.help)}## Default: {default}\n# c.{SECTION}.{name} = {example}\n")
    return "\n".join(parts)


def _pools_example(text: str) -> str:
    lines = [_comment(text) + "# c.GPUBroker.pools = {", '#     "default": {']
    for key, rule in POOL_KEYS.items():
        lines += textwrap.wrap(rule.help, _WIDTH, initial_indent="##         ", subsequent_indent="##         ")
        lines.append(f'#         "{key}": {_literal(rule.default_value)},  # or {_literal(rule.example)}')
    return "\n".join([*lines, "#     },", "# }"]) + "\n"


def _comment(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _WIDTH, initial_indent="## ", subsequent_indent="## ") + "\n"


def _literal(value: object) -> str:
    """Return the value as Python source, with double quotes around text."""
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value)
