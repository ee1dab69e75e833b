"""The files that Slurm's and systemd's configuration name on a node, and the lines to add to Slurm's own files. Pure text.

Prolog and Epilog are shell scripts with a time limit around our command, and end with 0 whatever becomes of it: Slurm drains a node
otherwise. The task's prolog is plain POSIX shell: it runs before each task, as the user, and must cost nothing.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fractional_gpu.core.units import plural
from fractional_gpu.engines.slurm import CLOSED, OPEN

__all__ = ["NodeFiles", "install_files", "slurm_lines"]

_HOOK_S = 9
_RUN = Path("/run")

_HOOK = """\
#!/bin/sh
# {what} of Slurm: {does}
# Written by `jupyter gpu node install`. Slurm drains a node whose {what} fails: this one always ends with 0, within {limit} s.
cd / || true
timeout -k 1 {limit} {command} </dev/null >/dev/null 2>&1
exit 0
"""

_TASK_PROLOG = """\
#!/bin/sh
# TaskProlog of Slurm: what the tasks of a job with a GPU share get in their environment. It runs as the user, before each task;
# Slurm reads `export NAME=value` and `print TEXT` from its output.
# Written by `jupyter gpu node install`. If you have a TaskProlog already, call this one at its end.
case $SLURM_JOB_ID in '' | *[!0-9]*) exit 0 ;; esac
file={seats}/job-$SLURM_JOB_ID.env
[ -r "$file" ] || exit 0
while IFS= read -r line; do
  case $line in
    'print '*) [ "${{SLURM_LOCALID:-0}}" != 0 ] || printf '%s\\n' "$line" ;;
    [A-Z]*=*) printf 'export %s\\n' "$line" ;;
  esac
done <"$file"
exit 0
"""

_AGENT_UNIT = """\
# /etc/systemd/system/jupyter-gpu-agent.service, on each node. Written by `jupyter gpu node install`.
[Unit]
Description=Gives Slurm the numbers of this node's GPU broker
After=network-online.target jupyter-gpu.service
Wants=network-online.target

[Service]
ExecStart={command}
Restart=always
RestartSec=5
# It calls scontrol and squeue, and writes seats' files for users: root, but nothing else of the machine.
ProtectSystem=strict
{writable}
ProtectHome=yes
PrivateTmp=yes
NoNewPrivileges=yes
CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """What the files are made from. `command`: how `jupyter gpu` is run; `words`: its options that agent, Prolog and Epilog share."""

    command: Sequence[str]
    seats: Path
    words: Sequence[str] = ()
    node: str = ""  # the node's name in Slurm; empty: its host's
    counts: Mapping[str, str] = field(default_factory=lambda: {"default": "jgpu"})  # by pool


def install_files(files: NodeFiles) -> dict[str, str]:
    """Return the text of each file, by its name in the folder of the installation. All but the unit are to be executable."""
    run = [*files.command, "node"]
    agent = [*run, "agent", "--engine", "slurm", *(["--node", files.node] if files.node else []), *files.words]
    return {
        "prolog": _hook("Prolog", "registers a job's GPU share as a seat.", [*run, "prolog", *files.words]),
        "epilog": _hook("Epilog", "ends the job's seat.", [*run, "epilog", *files.words]),
        "taskprolog": _TASK_PROLOG.format(seats=shlex.quote(str(files.seats))),
        "jupyter-gpu-agent.service": _AGENT_UNIT.format(
            command=_unit_words(agent), writable=_writable(files.seats.parent)
        ),
    }


def slurm_lines(files: NodeFiles, folder: Path, *, devices: int, promise: int, node: str) -> dict[str, str]:
    """Return the lines to add to each of Slurm's files, by its name.

    `devices`: of the node; `promise`: how many times its devices the pools may promise (their `oversubscription`), which is the most that
    the agent can open. Until it opens more, after a restart too, a node takes what its devices have without sharing.
    """
    names = sorted(files.counts.values())
    opened, closed = 1000 * devices, 1000 * devices * max(0, promise - 1)
    gres = ",".join(f"{name}:{OPEN}:{opened},{name}:{CLOSED}:{closed}" for name in names)
    return {
        "slurm.conf": f"""\
# {plural(devices, "GPU")}, {promise} times as much may be promised: the sum never changes, the agent moves parts to `open`.
GresTypes={",".join(names)}
NodeName={node} Gres={gres} ...
SelectType=select/cons_tres
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
PrologFlags=Contain
Prolog={folder}/prolog
Epilog={folder}/epilog
TaskProlog={folder}/taskprolog
""",
        "gres.conf": "".join(
            f"NodeName={node} Name={name} Type={kind} Count={count} Flags=CountOnly\n"
            for name in names
            for kind, count in ((OPEN, opened), (CLOSED, closed))
        ),
        "cgroup.conf": "ConstrainRAMSpace=yes\n",
    }


def _hook(what: str, does: str, command: Sequence[str]) -> str:
    return _HOOK.format(what=what, does=does, limit=_HOOK_S, command=shlex.join(command))


def _writable(folder: Path) -> str:
    """Return the lines by which the agent may write below a folder.

    Below /run systemd makes it: a folder that the broker's unit made after the agent's start would stay read-only for the agent.
    """
    below = folder.relative_to(_RUN) if folder.is_relative_to(_RUN) else Path()
    if not below.parts:
        return f"ReadWritePaths={_unit_words([f'-{folder}'])}"
    return f"RuntimeDirectory={_unit_words([str(below)])}\nRuntimeDirectoryMode=0755\nRuntimeDirectoryPreserve=yes"


def _unit_words(words: Sequence[str]) -> str:
    """Return a command line for systemd, which takes `%` and `$` as its own."""
    quoted = (
        word if word.replace("/", "").replace("-", "").replace(".", "").isalnum() else f'"{_escaped(word)}"'
        for word in words
    )
    return " ".join(quoted)


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
