"""`jupyter gpu node ACTION`: a table of actions. Their modules import what they need when they run, since Slurm's Prolog must be fast."""

import argparse
import importlib
from typing import NamedTuple, Protocol, cast

_FOLDER = "fractional_gpu.commands.node"


class _Entry(NamedTuple):
    module: str
    summary: str


class _Action(Protocol):
    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


ACTIONS: dict[str, _Entry] = {
    "agent": _Entry(f"{_FOLDER}.agent", "give the cluster's engine the numbers of this node's broker, as a service"),
    "prolog": _Entry(f"{_FOLDER}.hooks", "Slurm's Prolog: register a job's share as a seat"),
    "epilog": _Entry(f"{_FOLDER}.hooks", "Slurm's Epilog: end the job's seat"),
    "worker": _Entry(
        f"{_FOLDER}.worker", "the checkpoint worker as a service, for a broker in a container without privileges"
    ),
    "install": _Entry(
        f"{_FOLDER}.install", "write or print the files for a node, and the lines for Slurm's configuration"
    ),
    "doctor": _Entry(
        f"{_FOLDER}.doctor", "examine Slurm's configuration, the scripts, the broker and the agent of this node"
    ),
}

EPILOG = """\
examples:
  jupyter gpu node install --devices 4      write Slurm's scripts and the agent's unit, and say what to add to slurm.conf
  jupyter gpu node doctor                   what is wrong on this node, and what to change
  jupyter gpu node agent --engine slurm     what the unit runs

An administrator's guide, line by line: docs/clusters.md. `jupyter gpu node ACTION --help` explains an action.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run and set up what a cluster's node needs beside the broker. For administrators."
    parser.epilog = EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, entry in ACTIONS.items():
        action = actions.add_parser(
            name, help=entry.summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        _action(name).configure(action)


def _action(name: str) -> _Action:
    module = importlib.import_module(ACTIONS[name].module)
    return cast("_Action", getattr(module, "ACTIONS", {}).get(name, module))


def run(options: argparse.Namespace) -> int:
    return _action(options.action).run(options)
