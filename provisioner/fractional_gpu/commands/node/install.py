"""`jupyter gpu node install`: writes Slurm's scripts and the agent's unit, and prints the lines that Slurm's own files need."""

import argparse
import os
import socket as socket_module
import sys
from pathlib import Path

from fractional_gpu.commands.node.options import add_node_options, counts_of, seats_folder, words_of
from fractional_gpu.commands.terminal.errors import CommandError, UsageError

FOLDER = Path("/etc/jupyter-gpu/slurm")
EPILOG = """\
examples:
  jupyter gpu node install                          write the scripts and the unit to /etc/jupyter-gpu/slurm
  jupyter gpu node install --print                  print them, and write nothing
  jupyter gpu node install --pool default=jgpu --pool big=jgpubig

Slurm's own files are not touched: the lines that they need are printed. Nothing is started. To uninstall, take the lines out again
and delete the folder; docs/clusters.md says in which order.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the action and add its arguments."""
    parser.description = (
        "Write Slurm's scripts and the agent's unit for this node, and say what to add to Slurm's files."
    )
    parser.epilog = EPILOG
    parser.add_argument("--folder", metavar="DIR", type=Path, default=FOLDER, help=f"where to (default: {FOLDER})")
    parser.add_argument("--print", action="store_true", help="print the files, and write nothing")
    parser.add_argument("--node", metavar="NAME", help="the node's name in Slurm (default: the host's short name)")
    parser.add_argument("--devices", metavar="N", type=int, default=1, help="how many GPUs the node has (default: 1)")
    parser.add_argument(
        "--promise",
        metavar="TIMES",
        type=int,
        default=4,
        help="how many times its GPUs may be promised: the pool's oversubscription (default: 4)",
    )
    add_node_options(parser)


def run(options: argparse.Namespace) -> int:
    """Write or print the files. Raises CommandError where they cannot be written, and UsageError."""
    from fractional_gpu.engines.files import NodeFiles, install_files, slurm_lines  # noqa: PLC0415 - not for help texts

    for name, value in (("--devices", options.devices), ("--promise", options.promise)):
        if not 1 <= value <= 64:
            raise UsageError(f"{name} {value}: allowed are 1 to 64")
    if not options.folder.is_absolute():
        raise UsageError(f"--folder {options.folder}: Slurm needs an absolute path, such as {FOLDER}")
    files = NodeFiles(
        command=_command(),
        seats=seats_folder(options),
        words=words_of(options),
        node=options.node or "",
        counts=counts_of(options.pool),
    )
    texts = install_files(files)
    node = options.node or socket_module.gethostname().partition(".")[0]
    for name, text in texts.items():
        if options.print:
            print(f"==== {options.folder / name}\n{text}")
        else:
            _write(options.folder / name, text, executable=not name.endswith(".service"))
            print(f"wrote {options.folder / name}")
    for name, text in slurm_lines(
        files, options.folder, devices=options.devices, promise=options.promise, node=node
    ).items():
        print(f"==== for {name}\n{text}")
    if not options.print:
        print(
            f"The agent: `ln -s {options.folder}/jupyter-gpu-agent.service /etc/systemd/system/ && systemctl enable --now "
            "jupyter-gpu-agent`. Then `scontrol reconfigure`, and `jupyter gpu node doctor` here."
        )
    return 0


def _command() -> list[str]:
    """Return how this installation's `jupyter gpu` is run."""
    script = Path(sys.executable).with_name("jupyter-gpu")
    return [str(script)] if script.is_file() else [sys.executable, "-P", "-m", "fractional_gpu.commands.main"]


def _write(path: Path, text: str, *, executable: bool) -> None:
    from fractional_gpu.host.files import replace_file  # noqa: PLC0415 - not for help texts

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o755 if executable else 0o644
        replace_file(path, text.encode(), prepare=lambda descriptor: os.fchmod(descriptor, mode))
    except OSError as error:
        raise CommandError(
            f"{path} cannot be written: {error.strerror}; run this as root, or choose --folder"
        ) from error
