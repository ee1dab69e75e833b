"""`jupyter gpu node COMMAND`: finds the command of a node, and imports only that one."""

import argparse
import importlib
from typing import Final

COMMANDS: Final = {
    "worker": (
        "fractional_gpu.commands.node.worker",
        "the checkpoint worker as a service for a broker without privileges",
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its subcommands."""
    parser.description = "What runs on the nodes of a cluster."
    commands = parser.add_subparsers(dest="node_command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        below = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        importlib.import_module(module).configure(below)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit code. Raises as it does."""
    code: int = importlib.import_module(COMMANDS[options.node_command][0]).run(options)
    return code
