"""A pytest plugin that replaces batchspawner's Slurm spawner with ours in batchspawner's tests.

Those tests imitate Slurm: each command of the spawner goes to `run_command`, which compares it with the next expected one and gives
the answer. Our spawner runs commands without a shell, asks for other columns, and passes sbatch's options on the command line. So
this plugin translates: it passes each command as one line, options of sbatch as equivalent `#SBATCH` lines, and the state and node of
an answer in our columns. Requests that batchspawner's spawner does not make (nodes, jobs of an earlier start) it answers itself. It
runs in the suite's environment, so it imports nothing from `tests`.
"""

import shlex
import time
from collections.abc import Mapping
from typing import Any

import batchspawner

from fractional_gpu.engines.engine import EngineUnavailableError
from fractional_gpu.protocol.nodes import NodeSummary, PoolSummary, encode_summary
from fractional_gpu_hub.engines import slurm, slurm_commands

_POOL = PoolSummary(
    name="default", devices=1, total_milli=1000, held_milli=0, admissible_milli=1000, device_mib=8192, count="jgpu:open"
)
_made: list["_Spawner"] = []


class _Spawner(slurm.FractionalGPUSlurmSpawner):
    """Remembers the spawner made last, whose `run_command` gets all commands."""

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - the spawner's
        super().__init__(**kwargs)
        _made.append(self)


async def _run(*words: str, stdin: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    if "scontrol" in words:
        summary = encode_summary(NodeSummary(at_s=int(time.time()), pools=[_POOL]))
        return f"NodeName=userhost123 State=IDLE Partitions=main Extra={summary}"
    if any(word.startswith("--name=") for word in words):
        return ""
    if stdin is not None:
        options = [f"#SBATCH {word}" for word in words[words.index("sbatch") + 1 :]]
        first, _, rest = stdin.partition("\n")
        stdin = "\n".join([first, *options, rest])
    said = str(await _made[-1].run_command(shlex.join(words), input=stdin, env=environment))
    if "error" in said:
        raise EngineUnavailableError(said)
    if "squeue" not in words or not said:
        return said
    state, _, node = said.partition(" ")
    return f"{_made[-1].job_id}|{state}|{node or 'n/a'}|N/A|None"


for _module in (slurm_commands, slurm):
    vars(_module).update(run=_run)
batchspawner.SlurmSpawner = _Spawner
