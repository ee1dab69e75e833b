"""A plugin for pytest that puts our Slurm spawner in the place of batchspawner's in batchspawner's tests.

Those tests play Slurm themselves: each command of the spawner goes to `run_command`, which compares it with what comes next and gives the
answer. Ours sends words without a shell, asks for other columns, and has sbatch's options on the command line. So this plugin stands
between: it passes each command on as one line, an option of sbatch as the `#SBATCH` line that means the same, and puts the state and node
of an answer into our columns. What batchspawner's spawner does not ask (nodes, jobs that an earlier start left), it answers itself. It
runs in the suite's own environment, so it imports nothing of `tests`.
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
    """Remembers itself: the commands of the spawner that was made last go to its `run_command`."""

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
