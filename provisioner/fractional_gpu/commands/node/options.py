"""Options shared by the actions of `jupyter gpu node`. The Slurm Prolog imports this module, so it must stay lightweight."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.text import UsageError

if TYPE_CHECKING:
    from fractional_gpu.engines.hooks import HookSettings

SOCKET = "/run/jupyter-gpu/broker.sock"
COUNT = "jgpu"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
RESERVED = ("gpu", "shard", "mps", "gres")


def add_node_options(parser: Parser) -> None:
    parser.argument("--socket", "PATH", f"the broker's socket (default: {SOCKET})", default=SOCKET)
    parser.argument(
        "--seats", "DIR", "the folder for jobs' seat files (default: `seats` next to the socket)", type=Path
    )
    parser.argument(
        "--pool",
        "POOL[=GRES]",
        f"a pool and, for Slurm, the name of its generic resource (repeatable; default: default={COUNT})",
        action="append",
    )
    parser.argument(
        "--shards",
        "POOL",
        "support Slurm's gres/shard: a job's shards become a share of this pool, pinned to the GPU that Slurm chose",
        default="",
    )
    parser.flag(
        "--no-groups",
        "use this if Slurm runs without proctrack/cgroup; jobs are then told apart only by user, so two jobs of the same user look alike",
    )
    parser.argument(
        "--short-memory",
        None,
        "if the job's memory (--mem) cannot hold the share's data, shrink the share to fit, refuse it, or allow it even though its kernels "
        "might keep others off the GPU (default: fit)",
        choices=("fit", "refuse", "allow"),
        default="fit",
    )


def seats_folder(options: argparse.Namespace) -> Path:
    folder: Path | None = options.seats
    return folder if folder is not None else Path(options.socket).parent / "seats"


def hook_settings(options: argparse.Namespace) -> "HookSettings":
    from fractional_gpu.engines.hooks import HookSettings  # noqa: PLC0415 - not for help texts

    return HookSettings(
        socket=options.socket,
        folder=seats_folder(options),
        pools={count: pool for pool, count in counts_of(options.pool).items()},
        shard_pool=options.shards,
        has_groups=not options.no_groups,
        short_memory=options.short_memory,
    )


def counts_of(words: list[str] | None) -> dict[str, str]:
    counts: dict[str, str] = {}
    for word in words or [f"default={COUNT}"]:
        pool, separator, count = word.partition("=")
        count = count if separator else COUNT
        if not pool or not pool.isprintable():
            raise UsageError(f"--pool {word!r} does not name a pool; use POOL or POOL=GRES, such as default={COUNT}")
        if not _NAME.fullmatch(count) or count in RESERVED:
            raise UsageError(
                f"--pool {word!r}: {count!r} is not a valid generic resource name; use a lower-case letter followed by "
                f"lower-case letters, digits and `_`, but not {', '.join(RESERVED)}"
            )
        if pool in counts or count in counts.values():
            raise UsageError(f"--pool {word!r}: each pool and each resource can only be named once")
        counts[pool] = count
    return counts


def words_of(options: argparse.Namespace) -> list[str]:
    words = [] if options.socket == SOCKET else ["--socket", options.socket]
    words += [] if options.seats is None else ["--seats", str(options.seats)]
    for pool in options.pool or ():
        words += ["--pool", pool]
    words += ["--shards", options.shards] if options.shards else []
    words += ["--no-groups"] if options.no_groups else []
    return words + ([] if options.short_memory == "fit" else ["--short-memory", options.short_memory])
