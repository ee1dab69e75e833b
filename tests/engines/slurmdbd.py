"""A real slurmdbd: what the accounting database contains about jobs that have ended. Run by `tests/run slurmdbd`, as root.

It is not part of the suite because it needs a database server. Its name keeps it from being collected.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fractional_gpu.core.metering.usage import SHARE_HOUR
from fractional_gpu.engines.engine import EngineUnavailableError
from fractional_gpu.engines.slurm import Slurm
from tests.support.paths import PYTHONPATH
from tests.support.slurm import GRES, Cluster, new_cluster
from tests.support.slurm_accounting import Accounting, new_accounting
from tests.support.slurm_job import JobKernel
from tests.support.slurm_nodes import GPUNode, gpu_nodes, install_scripts
from tests.support.world import until

OURS = "jupyter-gpu: kernels=1 cost=0.62EUR"
AS_WRITTEN = OURS.lower()  # by sacctmgr
DAY_S = 86_400
FIRST_KERNEL = "import sys; print(sys.version_info.major)"


@pytest.fixture(scope="module")
def accounting() -> Iterator[Accounting]:
    with new_accounting() as made:
        yield made


@pytest.fixture(scope="module")
def slurm(accounting: Accounting) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        with new_cluster(
            scripts=lambda nodes: install_scripts(nodes, os.environ, "--no-groups"), accounting=accounting
        ) as made:
            yield made


@pytest.fixture
def ours(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """The commands under test."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    return Slurm("n1")


def comments(slurm: Cluster, job: str) -> dict[str, str]:
    """Return the comments in the database for a job, an array's tasks or a heterogeneous job's parts that have ended."""
    words = ["sacct", "--local", "-X", "-n", "-P", f"--jobs={job}", "--format=JobID,End,AdminComment"]
    rows = [line.split("|", 2) for line in slurm.call(*words).splitlines()]
    return {name: comment for name, end, comment in rows if end != "Unknown"}


def await_end(slurm: Cluster, job: str, number: int = 1) -> None:
    """Wait until the database knows the ends of a job's parts, and which parts there are."""
    until(
        lambda: len(names := comments(slurm, job)) == number and (number == 1 or job not in names),
        f"the database knows the end of job {job}",
    )


def test_figures_are_of_one_task_of_an_array(slurm: Cluster, ours: Slurm) -> None:
    job = slurm.sbatch("true", "--array=1-2")  # the last task has the array's number
    await_end(slurm, job, 2)
    assert ours.comment_in_accounting(int(job), OURS)
    assert comments(slurm, job) == {f"{job}_1": "", f"{job}_2": AS_WRITTEN}


def test_figures_are_of_one_part_of_a_heterogeneous_job(slurm: Cluster, ours: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "parts.sh"
    script.write_text("#!/bin/sh\n#SBATCH --nodelist=n1\n#SBATCH hetjob\n#SBATCH --nodelist=n2\ntrue\n")
    job = slurm.call("sbatch", "--parsable", "--output=/dev/null", str(script)).strip()
    await_end(slurm, job, 2)
    assert ours.comment_in_accounting(int(job), OURS)
    assert comments(slurm, job) == {f"{job}+0": AS_WRITTEN, f"{job}+1": ""}


def test_anothers_comment_stays(slurm: Cluster, ours: Slurm) -> None:
    job = slurm.sbatch("exec sleep 600")
    slurm.await_job(job, "RUNNING")
    slurm.call("scontrol", "update", f"jobid={job}", "admincomment=JS1:H4sIAAo, 'quoted'")
    slurm.cancel(job)
    await_end(slurm, job)
    assert ours.comment_in_accounting(int(job), OURS)
    assert comments(slurm, job) == {job: "JS1:H4sIAAo, 'quoted'"}


def test_a_requeued_jobs_runs_have_figures_of_their_own(slurm: Cluster, ours: Slurm) -> None:
    job = slurm.sbatch("exec sleep 600", "--requeue")
    slurm.await_job(job, "RUNNING")
    slurm.call("scontrol", "requeue", job)
    slurm.await_job(job, "PENDING")
    await_end(slurm, job)
    assert ours.comment_in_accounting(int(job), OURS)
    until(lambda: slurm.call("scontrol", "update", f"jobid={job}", "starttime=now") == "", "it may start at once")
    slurm.await_job(job, "RUNNING")
    until(lambda: not ours.comment_in_accounting(int(job), "of the second run"), "the second run has not ended")
    slurm.cancel(job)
    await_end(slurm, job)
    words = ["sacct", "-D", "-X", "-n", "-P", f"--jobs={job}", "--format=AdminComment"]
    assert slurm.call(*words).splitlines() == [AS_WRITTEN, ""]


def test_a_database_that_hangs_is_named(slurm: Cluster, ours: Slurm, accounting: Accounting) -> None:
    assert ours.config()["AccountingStorageType"] == "accounting_storage/slurmdbd"
    job = slurm.sbatch("true")
    await_end(slurm, job)
    os.kill(accounting.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineUnavailableError, match="slurmdbd or the network is down"):
            Slurm("n1", timeout_s=0.5).comment_in_accounting(int(job), OURS)
    finally:
        os.kill(accounting.pid, signal.SIGCONT)


def test_the_last_figures_of_a_job_come_into_the_database_when_it_is_back(
    slurm: Cluster, accounting: Accounting
) -> None:
    with gpu_nodes(slurm, more=["--no-groups"]) as nodes:
        job, before = ended_job(slurm, nodes[0], "up")
        until(lambda: figures_changed(slurm, job, before), "its last figures are there")
        accounting.stop()
        job, before = ended_job(slurm, nodes[0], "down")
        until(lambda: "not in the accounting database yet: slurmdbd" in nodes[0].log(), "the agent says so")
        accounting.start()
        until(lambda: figures_changed(slurm, job, before), "its last figures are there")


def running_comment(slurm: Cluster, job: str) -> str:
    """Return the comment in slurmctld."""
    found = re.search(r"AdminComment=(.*?)\s+StdErr=", slurm.call("scontrol", "show", "job", "-o", job))
    return found[1] if found is not None else ""


def figures_changed(slurm: Cluster, job: str, before: str) -> bool:
    """Whether the database has figures of a job that slurmctld did not have."""
    there = comments(slurm, job).get(job, "")
    return there.startswith("jupyter-gpu: kernels=1 ") and there.lower() != before.lower()


def ended_job(slurm: Cluster, node: GPUNode, name: str) -> tuple[str, str]:
    """Run a job with a kernel to its end. Return its number and its last comment while running; its use has grown since."""
    kernel = JobKernel(slurm.folder / name)
    job = slurm.sbatch(kernel.command, f"--gres={GRES}:open:250", "-w", node.node.name, "--mem=1600")
    assert kernel.cell(FIRST_KERNEL) == "3\n"
    until(lambda: running_comment(slurm, job), "it has figures")
    assert node.agent is not None
    os.kill(node.agent.pid, signal.SIGSTOP)
    before = running_comment(slurm, job)
    now_s = int(time.time())
    with node.client() as client:

        def used() -> int:
            return sum(
                entry.usage.reserved_share
                for entry in client.usage(["lease"], now_s - DAY_S, now_s + DAY_S, {"user": "root"}).entries
            )

        enough = used() + SHARE_HOUR // 1000
        until(lambda: used() > enough, "the job has used more")
    kernel.end()
    slurm.await_job(job, "COMPLETED")
    os.kill(node.agent.pid, signal.SIGCONT)
    return job, before


def test_a_job_of_a_federation_is_known_on_the_cluster_where_it_runs(
    slurm: Cluster, accounting: Accounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_cluster(accounting=accounting, sibling=slurm) as other:
        slurm.call("sacctmgr", "-i", "add", "federation", "both", f"clusters={slurm.name},{other.name}")
        until(lambda: other.name in slurm.call("scontrol", "show", "federation"), "they know each other")
        slurm.call("scontrol", "update", "nodename=n[1-2]", "state=drain", "reason=test")
        job = slurm.sbatch("exec sleep 600", f"--gres={GRES}:open:250", "-w", "n1")
        until(lambda: other.call("squeue", "--local", "-h", "-t", "R", "-o", "%A").strip() == job, "it runs there")
        monkeypatch.setenv("SLURM_CONF", str(other.conf))
        found = Slurm("n1").job(int(job))
        assert found is not None
        assert (found.state, dict(found.gres)) == ("RUNNING", {f"{GRES}:open": 250})
        assert [one.job_id for one in Slurm("n1").jobs()] == [int(job)]
        subprocess.run(["scancel", job], env=slurm.environment, check=True)
        until(lambda: not other.call("squeue", "--local", "-h").strip(), "it has ended")
