"""`jupyter gpu node install` writes the Slurm scripts and the agent's unit, and prints the changes to make in Slurm's own files."""

import argparse
import os
import shutil
import socket as socket_module
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fractional_gpu.commands.node.options import add_node_options, counts_of, seats_folder, words_of
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.text import CommandError, UsageError, file_errors

if TYPE_CHECKING:
    from fractional_gpu.engines.files import NodeFiles

FOLDER = Path("/etc/jupyter-gpu/slurm")
WRAPPER = "jupyter-gpu-wrapper"  # next to slurm.conf
EPILOG = """\
examples:
  jupyter gpu node install --wrapper                write the wrapper that slurm.conf names next to slurm.conf; do this on every node
  jupyter gpu node install                          write this node's scripts and the unit to /etc/jupyter-gpu/slurm
  jupyter gpu node install --print                  print them without writing anything
  jupyter gpu node install --pool default=jgpu --pool big=jgpubig

It never changes Slurm's own files: it prints the necessary changes, and writes them to site.diff for `patch`. If an installed file differs,
because you edited it or chose other options, it is kept, and the new one is written to FILE.new. Nothing is started.
docs/clusters.md lists the steps, and explains how to uninstall.
"""


def configure(parser: Parser) -> None:
    parser.describe(
        "Write Slurm's scripts and the agent's unit for this node, and say what to change in Slurm's files.", EPILOG
    )
    parser.argument("--folder", "DIR", f"the folder to write to (default: {FOLDER})", type=Path, default=FOLDER)
    parser.flag("--print", "print the files without writing anything")
    parser.flag("--force", "replace files that differ")
    parser.flag("--wrapper", "write only the wrapper, which every node needs")
    only = "give shares only to this partition's jobs, so that other jobs cause no queries to slurmctld (repeatable; default: all)"
    parser.argument("--partition", "NAME", only, action="append", default=[])
    for name, metavar, kind, text in (
        ("--slurm-bin", "DIR", str, "where Slurm's commands are (default: where this shell finds squeue)"),
        ("--node", "NAME", str, "the node's name in Slurm (default: the host's short name)"),
        ("--devices", "N", int, "how many GPUs the node has (default: as in slurm.conf, or 1)"),
        ("--promise", "TIMES", int, "the pool's oversubscription (default: as in slurm.conf, or 4)"),
    ):
        parser.argument(name, metavar, text, type=kind)
    add_node_options(parser)


def run(options: argparse.Namespace) -> int:
    from fractional_gpu.engines.files import SCRIPTS, change_site, install_files, site_files, wrapper_text  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.slurm import Slurm  # noqa: PLC0415 - as above

    for name, value in (("--devices", options.devices), ("--promise", options.promise)):
        if value is not None and not 1 <= value <= 64:
            raise UsageError(f"{name} must be from 1 to 64, not {value}")
    if not options.folder.is_absolute():
        raise UsageError(f"--folder {options.folder}: Slurm needs an absolute path, such as {FOLDER}")
    node = options.node or socket_module.gethostname().partition(".")[0]
    files = node_files(options)
    slurm = Slurm(node)
    path = slurm.conf()
    with file_errors("read", path):
        confs = site_files(path)
    wrapper = path.with_name(WRAPPER)
    named = {name: confs[0].value(name) for name in SCRIPTS}
    if options.wrapper:
        if str(wrapper) in named.values():
            raise CommandError(
                f"{path} already names {wrapper}, which calls the site's own scripts; the wrapper was not changed"
            )
        return _put(options, {wrapper: wrapper_text(options.folder, named)})
    change_site(files, confs, wrapper, node, slurm.names, devices=options.devices, promise=options.promise)
    texts = {options.folder / name: text for name, text in install_files(files).items()}
    diff = "".join(one.diff() for one in confs)
    code = _put(options, {**texts, **({options.folder / "site.diff": diff} if diff else {})})
    if options.print:
        return code
    print(f"==== changes to Slurm's files\n{diff or 'none: they already have everything that shares need'}")
    if not wrapper.exists():
        print(f"{wrapper} is missing: create it with --wrapper, and copy it to every node before slurm.conf names it.")
    print(
        f"Next: run `patch -d / -p1 < {options.folder / 'site.diff'}` where you keep these files; copy them to all nodes; restart "
        "slurmctld and each slurmd (`scontrol reconfigure` does not load new GresTypes). Then start the agent and run "
        "`jupyter gpu node doctor`; see docs/clusters.md."
    )
    return code


def node_files(options: argparse.Namespace) -> "NodeFiles":
    from fractional_gpu.engines.files import NodeFiles  # noqa: PLC0415 - not for help texts

    return NodeFiles(
        command=_command(),
        seats=seats_folder(options),
        words=words_of(options),
        node=options.node or "",
        counts=counts_of(options.pool),
        slurm_bin=getattr(options, "slurm_bin", None) or os.path.dirname(shutil.which("squeue") or ""),  # noqa: PTH120 - "" without one
        partitions=getattr(options, "partition", ()),
    )


def _put(options: argparse.Namespace, texts: Mapping[Path, str]) -> int:
    code = 0
    for path, text in texts.items():
        if options.print:
            print(f"==== {path}\n{text}")
            continue
        fresh = path
        if path.exists() and path.read_bytes() != text.encode(errors="surrogateescape") and not options.force:
            fresh, code = path.with_name(f"{path.name}.new"), 1
            print(f"{path} differs and was not changed: compare it with {fresh}, or use --force")
        _write(fresh, text, executable=path.suffix not in (".service", ".diff"))
        print(f"wrote {fresh}")
    return code


def _command() -> list[str]:
    script = Path(sys.executable).with_name("jupyter-gpu")
    return [str(script)] if script.is_file() else [sys.executable, "-P", "-m", "fractional_gpu.commands.main"]


def _write(path: Path, text: str, *, executable: bool) -> None:
    from fractional_gpu.host.files import replace_file  # noqa: PLC0415 - not for help texts

    mode = 0o755 if executable else 0o644
    with file_errors("written", path, "; run this as root, or choose another --folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(
            path, text.encode(errors="surrogateescape"), prepare=lambda descriptor: os.fchmod(descriptor, mode)
        )
