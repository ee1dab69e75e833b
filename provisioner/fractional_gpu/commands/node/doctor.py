"""`jupyter gpu node doctor`: examines a node of a Slurm cluster: finding, and what to change. Changes nothing."""

import argparse
import sys
from pathlib import Path

from fractional_gpu.commands.node.install import FOLDER
from fractional_gpu.commands.node.options import add_node_options
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import terminal_width, write

EPILOG = """\
examples:
  jupyter gpu node doctor
  jupyter gpu node doctor --json        one object: {"ok": ..., "worst": ..., "findings": [...]}
  jupyter gpu node doctor --everywhere  whether every node has the wrapper: a short job on each; before slurm.conf names it

Exit code 0: it works, perhaps with warnings. 1: something cannot work. Run it as root on a node; nothing is changed.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Examine Slurm's configuration, the scripts, the broker and the agent of this node."
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--everywhere", action="store_true", help="only check that every node has the wrapper")
    parser.add_argument(
        "--folder", metavar="DIR", type=Path, default=FOLDER, help=f"of the scripts (default: {FOLDER})"
    )
    parser.add_argument("--node", metavar="NAME", help="the node's name in Slurm (default: the host's short name)")
    add_node_options(parser)


def run(options: argparse.Namespace) -> int:
    from fractional_gpu.commands.doctor.report import as_json, exit_code, render  # noqa: PLC0415 - not for help texts
    from fractional_gpu.commands.node.checks import examine  # noqa: PLC0415 - as above

    with Progress("examining this node ...", blocks=True, silent=True):
        findings = list(examine(options))
    if options.json:
        sys.stdout.write(as_json(findings))
    else:
        write(render(findings, width=terminal_width(sys.stdout)))
    return exit_code(findings)
