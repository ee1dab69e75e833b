"""Generates the files that a node needs for Slurm and systemd, and the changes to Slurm's own files. Nothing is written to disk.

slurm.conf is the same on all nodes, and Slurm drains a node on which the configured Prolog or Epilog is missing. So slurm.conf names a
wrapper that every node has. The wrapper calls the site's own script, and our script if the node has it. Our scripts run our command with a
time limit, and always exit with 0. The task prolog is plain POSIX shell, because it runs as the user before each task and must be fast.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fractional_gpu.engines.engine import EngineError
from fractional_gpu.engines.site_files import ConfigFile, extended
from fractional_gpu.engines.slurm import CLOSED, OPEN, gres_words, parse_gres, total_of

_PROMISE = 4

SCRIPTS = {"Prolog": "prolog_slurmd", "Epilog": "epilog_slurmd", "TaskProlog": "prolog_task"}
"""Maps each script's name in slurm.conf to its name in SLURM_SCRIPT_CONTEXT."""

KEYS = ("GresTypes", "TaskPlugin", "PrologFlags", "ProctrackType", "SelectType", *SCRIPTS)
_HOOK_S = 9
_RUN = Path("/run")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_WRAPPER = """\
#!/bin/sh
# Prolog, Epilog and TaskProlog of Slurm, the same file on every node: Slurm drains a node that lacks what slurm.conf names.
# It runs the site's own script, whose failure counts, and then ours, on nodes that have it.
# Written by `jupyter gpu node install --wrapper`.
case $SLURM_SCRIPT_CONTEXT in
{cases}  *) exit 0 ;;
esac
for script in $site; do
  "$script" "$@" || exit
done
[ -x {folder}/$ours ] && {folder}/$ours
exit 0
"""

_HOOK = """\
#!/bin/sh
# Slurm's {what}: {does}
# Written by `jupyter gpu node install`. Slurm drains a node whose {what} fails: this one always exits with 0, within {limit} s.
# slurmd gives it no PATH.
export PATH={path}
cd / || true
[ "$1" != --check ] || exec {command} --check
{skip}timeout -k 1 {limit} {command} </dev/null >/dev/null 2>&1
exit 0
"""

_TASK_PROLOG = """\
#!/bin/sh
# Slurm's TaskProlog: what the tasks of a job with a GPU share get in their environment. It runs as the user, before each task;
# Slurm reads `export NAME=value` and `print TEXT` from its output. Written by `jupyter gpu node install`.
case $SLURM_JOB_ID in '' | *[!0-9]*) exit 0 ;; esac
file={seats}/job-$SLURM_JOB_ID.env
[ -r "$file" ] || exit 0
if [ ! -s "$file" ]; then # the Prolog could make the file, and write nothing into it
  printf '%s\\n' 'export CUDA_VISIBLE_DEVICES=' "print jupyter gpu: this job has no GPU share: the disk that holds $file is full"
fi
while IFS= read -r line; do
  case $line in
    'print '*) [ "${{SLURM_LOCALID:-0}}" != 0 ] || printf '%s\\n' "$line" ;;
    'batch '*) [ -n "${{SLURM_STEP_ID:-}}" ] || printf 'print %s\\n' "${{line#batch }}" ;;
    [A-Z]*=*) printf 'export %s\\n' "$line" ;;
  esac
done <"$file"
exit 0
"""

_AGENT_UNIT = """\
# /etc/systemd/system/jupyter-gpu-agent.service, on each node. Written by `jupyter gpu node install`.
[Unit]
Description=Reports this node's GPU capacity to Slurm
After=network-online.target jupyter-gpu.service
Wants=network-online.target

[Service]
Environment="PATH={path}"
ExecStart={command}
Restart=always
RestartSec=5
# It calls scontrol and squeue, and writes seat files for users. It runs as root, but cannot write to the rest of the machine.
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
    """Settings for the files. `command` runs `jupyter gpu`. `words` lists the options shared by the agent, the Prolog and the Epilog.

    `slurm_bin` is the folder containing Slurm's commands, if they are not on the usual path. If `partitions` is given, only jobs in these
    partitions may have shares.
    """

    command: Sequence[str]
    seats: Path
    words: Sequence[str] = ()
    node: str = ""  # the node's name in Slurm, or "" to use the host name
    counts: Mapping[str, str] = field(default_factory=lambda: {"default": "jgpu"})  # the names of the counts, by pool
    slurm_bin: str = ""
    partitions: Sequence[str] = ()

    @property
    def path(self) -> str:
        return ":".join([*([self.slurm_bin] if self.slurm_bin else []), _PATH])


def install_files(files: NodeFiles) -> dict[str, str]:
    """Return the text of each file, by its name in the installation folder. All files except the unit must be executable."""
    run = [*files.command, "node"]
    agent = [*run, "agent", "--engine", "slurm", *(["--node", files.node] if files.node else []), *files.words]
    # A job in another partition must not start Python or query the controller. Neither must the end of a job that has no files here.
    ours = "|".join(shlex.quote(name) for name in files.partitions)
    others = f"case $SLURM_JOB_PARTITION in {ours}) ;; *) exit 0 ;; esac\n" if ours else ""
    unknown = f"[ -e {shlex.quote(str(files.seats))}/job-$SLURM_JOB_ID.env ] || exit 0\n"
    path = shlex.quote(files.path)

    def hook(what: str, does: str, skip: str) -> str:
        command = shlex.join([*run, what.lower(), *files.words])
        return _HOOK.format(what=what, does=does, skip=skip, limit=_HOOK_S, path=path, command=command)

    return {
        "prolog": hook("Prolog", "registers a job's GPU share as a seat.", others),
        "epilog": hook("Epilog", "ends the job's seat.", unknown),
        "taskprolog": _TASK_PROLOG.format(seats=shlex.quote(str(files.seats))),
        "jupyter-gpu-agent.service": _AGENT_UNIT.format(
            command=_unit_words(agent), path=_escaped(files.path), writable=_writable(files.seats.parent)
        ),
    }


def wrapper_text(folder: Path, site: Mapping[str, str]) -> str:
    """Return the text of the wrapper. `site` maps keys in slurm.conf to the paths or patterns of the site's own scripts."""
    cases = "".join(
        f"  {context}) site={shlex.quote(site.get(name, '').replace(',', ' '))} ours={name.lower()} ;;\n"
        for name, context in SCRIPTS.items()
    )
    return _WRAPPER.format(cases=cases, folder=shlex.quote(str(folder)))


def site_files(conf: Path) -> list[ConfigFile]:
    """Read a site's slurm.conf, and gres.conf and cgroup.conf from the same folder. Raises OSError."""
    return [ConfigFile(conf), *(ConfigFile(conf.with_name(name)) for name in ("gres.conf", "cgroup.conf"))]


def change_site(
    files: NodeFiles,
    confs: Sequence[ConfigFile],
    wrapper: Path,
    node: str,
    names_of: Callable[[str], list[str]],
    *,
    devices: int | None = None,
    promise: int | None = None,
) -> None:
    """Change a site's files so that the nodes on `node`'s line in slurm.conf offer shares. Raises EngineError.

    `names_of` expands a node expression. `devices` is the number of devices on each node, or None to use the number in slurm.conf.
    `promise` is how many times each device may be allocated (the pools' `oversubscription`). This limits how much the agent can open. Until
    the agent opens more, and after each restart, Slurm allocates no more than the devices have.
    """
    conf, gres, cgroup = confs
    for name in SCRIPTS:
        conf.set(name, str(wrapper))
    conf.set("PrologFlags", extended(conf.value("PrologFlags"), "Contain"))
    conf.set("ProctrackType", "proctrack/cgroup")
    conf.set("TaskPlugin", extended(conf.value("TaskPlugin"), "task/cgroup"))
    if not conf.value("SelectType").endswith(("cons_tres", "cons_res")):
        conf.set("SelectType", "select/cons_tres")
    if cgroup.value("ConstrainRAMSpace").lower() != "yes":
        cgroup.set("ConstrainRAMSpace", "yes")
    if "--shards" in files.words:
        return  # the counts of gpu and shard do not change
    names = sorted(files.counts.values())
    conf.set("GresTypes", extended(conf.value("GresTypes"), *names))
    nodes = conf.of_key("NodeName")
    line = next((one for one in nodes if node in names_of(one.value("NodeName"))), None)
    if nodes and line is None:
        raise EngineError(f"{conf.path} has no node {node!r}; give the node's Slurm name with --node")
    text = line.value("Gres") if line is not None else ""
    there = parse_gres(text)
    opened = 1000 * (devices or total_of(there, "gpu") or 1)
    kinds = ((OPEN, opened), (CLOSED, opened * ((promise or _PROMISE) - 1)))
    ours = {f"{name}:{kind}": amount for name in names for kind, amount in kinds}
    if not (devices or promise) and ours.keys() <= there.keys():
        ours = {key: there[key] for key in ours}
    kept = [word for word in gres_words(text) if word.partition(":")[0] not in ("gpu", *names)]
    wanted = ",".join([*kept, *(f"{name}:{count}" for name, count in ours.items())])
    if line is None:
        conf.add(f"NodeName={node} Gres={wanted} ...")
    elif parse_gres(wanted) != there:
        conf.change(line, "Gres", wanted)
    others = ",".join(one.value("NodeName") for one in nodes if one is not line and "gpu" in one.value("Gres"))
    _change_gres(gres, ours, line.value("NodeName") if line is not None else node, others, names_of)


def _change_gres(
    gres: ConfigFile, ours: Mapping[str, int], where: str, others: str, names_of: Callable[[str], list[str]]
) -> None:
    """Give the nodes in `where` the counts in `ours` instead of whole GPUs. The nodes in `others` keep their GPUs. Raises EngineError."""
    form = "NodeName={} Name={} Count={} Flags=CountOnly"
    wanted = {key: form.format(where, key.replace(":", " Type="), amount) for key, amount in ours.items()}
    names = {key.partition(":")[0] for key in ours}
    for line in gres.settings:
        name, about = line.value("Name"), line.value("NodeName")
        key = f"{name}:{line.value('Type')}"
        if name not in {"gpu", "", *names} or (about and not set(names_of(about)) & set(names_of(where))):
            continue
        if key in wanted and wanted[key].partition(" ")[2] in line.text:
            del wanted[key]
        elif about == where or (not about and (name in names or not others)):
            gres.remove(line)
        elif not about:
            gres.put_before(line, f"NodeName={others} ")
        else:
            raise EngineError(f"{line.file}: split the line for {about} in two: only {where} should have shares")
    for added in wanted.values():
        gres.add(added)


def _writable(folder: Path) -> str:
    """Return the unit's lines that allow the agent to write to a folder.

    If the folder is below /run, systemd creates it. If the broker created it after the agent had started, the agent could not write to it.
    """
    below = folder.relative_to(_RUN) if folder.is_relative_to(_RUN) else Path()
    if not below.parts:
        return f"ReadWritePaths={_unit_words([f'-{folder}'])}"
    return f"RuntimeDirectory={_unit_words([str(below)])}\nRuntimeDirectoryMode=0755\nRuntimeDirectoryPreserve=yes"


def _unit_words(words: Sequence[str]) -> str:
    quoted = (
        word if word.replace("/", "").replace("-", "").replace(".", "").isalnum() else f'"{_escaped(word)}"'
        for word in words
    )
    return " ".join(quoted)


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
