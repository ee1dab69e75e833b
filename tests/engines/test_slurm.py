"""A real Slurm of two nodes, each with a broker and an agent, without control groups: counts, jobs with real kernels, failures.

Sessions of examples/ondemand are submitted, opened and ended as Open OnDemand does.
"""

import json
import os
import re
import signal
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import websocket

from fractional_gpu.engines.slurm import Slurm
from fractional_gpu.protocol.nodes import parse_summary
from tests.support.ondemand import PORTAL, Browser, Session
from tests.support.paths import QUICK, ROOT
from tests.support.slurm import GRES, Cluster
from tests.support.slurm_job import JobKernel
from tests.support.slurm_nodes import GPUNode, gpu_nodes
from tests.support.slurm_site import new_environment
from tests.support.stopping import stop
from tests.support.world import until

pytestmark = pytest.mark.promise("slurm")

HALF = f"--gres={GRES}:open:500"
QUARTER = f"--gres={GRES}:open:250"
IDLE, BUSY = "1%", "100%"
CONFIG = """
c.GPUBroker.pools = {"default": {"fractions": ["1/4", "1/2"], "oversubscription": 4, "expected_use": "100%"}}
"""
# Only part of a kernel's bytes is compared, as that takes processor time.
FILL = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import device; gpu = device.open(); "
    "data = gpu.fill(seed={seed}, size=16 * 2**20); rest = gpu.backend.cuda.allocate({rest} * 2**20); "
    "data.step(); print(data.wrong_bytes())"
)
CHECK = "data.step(); print(data.wrong_bytes())"


@pytest.fixture(scope="module")
def nodes(slurm: Cluster) -> Iterator[list[GPUNode]]:
    with gpu_nodes(slurm, more=["--no-groups"], config=CONFIG) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_jobs_left(slurm: Cluster, nodes: list[GPUNode]) -> Iterator[None]:
    assert len(nodes) == len(slurm.nodes)
    yield
    slurm.cancel_all()
    assert not [state for state in slurm.states().values() if "drain" in state or "down" in state], slurm.call(
        "sinfo", "-R"
    )


def share(node: GPUNode, use: str) -> None:
    """Tell a node's pool how much of the time its users compute: the forecast of how many it admits follows from that."""
    with node.client() as client:
        client.change_pool("default", {"expected_use": use})


def await_open(slurm: Cluster, milli: int, name: str = "n1") -> None:
    until(lambda: slurm.opened_milli(name) == milli, f"{name} is open for {milli}", pause_s=0.1)


def test_counts_are_written_again_after_a_reconfiguration_and_restarts_and_no_busy_node_is_drained(
    slurm: Cluster, nodes: list[GPUNode]
) -> None:
    share(nodes[0], IDLE)
    await_open(slurm, 4000)
    job = slurm.sbatch("exec sleep 600", HALF, "-w", "n1")
    slurm.await_job(job, "RUNNING")
    slurm.restart_node(slurm.nodes[0])  # it registers again: if a sum had changed, it would be drained
    assert slurm.states()["n1"] == "mixed"
    slurm.call("scontrol", "reconfigure")
    await_open(slurm, 4000)
    slurm.call("scontrol", "update", "nodename=n1", f"gres={GRES}:open:0,{GRES}:closed:4000", "extra=nonsense")
    await_open(slurm, 4000)
    slurm.stop_controller()
    try:
        until(lambda: "slurmctld" in nodes[0].log(), "the agent notices")
    finally:
        slurm.start_controller()
    slurm.call("scontrol", "update", "nodename=n1", f"gres={GRES}:open:0,{GRES}:closed:4000")
    await_open(slurm, 4000)  # the agent continues
    assert slurm.job(job)["JobState"] == "RUNNING"
    assert slurm.states()["n1"] == "mixed"
    summary = parse_summary(slurm.node("n1")["Extra"])
    assert [(pool.name, pool.count, pool.total_milli) for pool in summary.pools] == [("default", "jgpu:open", 1000)]
    share(nodes[0], BUSY)


def test_while_there_is_no_broker_jobs_start_and_are_told_and_end_and_their_seats_follow_when_it_is_back(
    slurm: Cluster, nodes: list[GPUNode]
) -> None:
    node = nodes[1]
    before = until(lambda: slurm.node("n2").get("Extra"), "the agent has published a summary")
    node.stop_agent()
    node.start_agent("--patience", "1s")
    ending = slurm.sbatch("exec sleep 600", QUARTER, "-w", "n2")
    until((node.seats / f"job-{ending}.json").exists, "the job has its seat")
    until(lambda: slurm.node("n2")["Extra"] != before, "the new agent has seen the broker", pause_s=0.1)
    node.stop_broker()
    slurm.cancel(ending)
    kernel = JobKernel(slurm.folder / "without")
    patient = f'until test -e "$JUPYTER_GPU_SEAT_FILE"; do sleep 0.1; done; {kernel.command}'
    job = slurm.sbatch(patient, QUARTER, "-w", "n2", "--mem=900")
    until(lambda: "no GPU share yet" in slurm.output(job), "the job is told")
    # The largest share on offer: with less, Slurm would refuse jobs instead of letting them wait.
    await_open(slurm, 500, "n2")
    until(lambda: parse_summary(slurm.node("n2")["Extra"]).problem, "the summary says why", pause_s=0.1)
    waiting = slurm.sbatch("true", HALF, "-w", "n2")
    until(lambda: slurm.job(waiting)["Reason"] == "Resources", "a further job waits", pause_s=0.1)

    node.start_broker()
    until((node.seats / f"job-{job}.json").exists, "the job has its seat")
    assert kernel.cell(FILL.format(seed=5, rest=80)) == "0\n"
    slurm.await_job(waiting, "COMPLETED")

    def seats() -> set[str]:
        with node.client() as client:
            return {seat.server for seat in client.seats().seats}

    until(lambda: seats() == {f"slurm-{job}"}, "the agent has ended the seat that the Epilog could not end")
    kernel.end()
    slurm.await_job(job, "COMPLETED")
    assert set(slurm.states().values()) == {"idle"}


def test_a_broker_that_hangs_delays_a_job_by_seconds_only(slurm: Cluster, nodes: list[GPUNode]) -> None:
    broker = nodes[1].broker
    assert broker is not None
    stop(broker.pid)
    try:
        job = slurm.sbatch("echo ran", QUARTER, "-w", "n2")
        slurm.await_job(job, "COMPLETED")
        assert "no GPU share yet" in slurm.output(job)
        assert "ran" in slurm.output(job)
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def test_a_share_that_no_seat_can_have_is_refused_in_the_jobs_output(slurm: Cluster, nodes: list[GPUNode]) -> None:
    job = slurm.sbatch("echo $CUDA_VISIBLE_DEVICES; echo ran", f"--gres={GRES}:250", "-w", "n1")
    slurm.await_job(job, "COMPLETED")
    assert f"ask for --gres={GRES}:open:250" in slurm.output(job)
    assert slurm.output(job).endswith("\n\nran\n")
    until(lambda: not list(nodes[0].seats.iterdir()), "its files are gone")


def check_comment(slurm: Cluster, job: str) -> None:
    """An array's last task has the array's number, and a heterogeneous job's first part the whole job's."""
    numbers = slurm.call("squeue", "-h", "-r", "-t", "R", "-j", job, "-o", "%A").split()
    assert (len(numbers), numbers.count(job)) == (2, 1)
    assert Slurm("n1").comment(int(job), "used")
    assert slurm.call("scontrol", "show", "job", "-o", job).count("AdminComment=used") == 1


def test_tasks_of_an_array_and_steps_of_salloc_have_seats_and_a_comment_is_one_tasks(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'test -r "$JUPYTER_GPU_SEAT_FILE" && echo "$JUPYTER_GPU_SEAT_FILE $JUPYTER_GPU_DEFAULT_FRACTION"; exec sleep 600'
    outputs = [slurm.folder / f"array-{task}.out" for task in (1, 2)]
    first = slurm.sbatch(script, QUARTER, "-w", "n1", "--array=1-2", output=slurm.folder / "array-%a.out")
    until(lambda: all(file.exists() and "250m\n" in file.read_text() for file in outputs), "both tasks have seats")
    assert len({file.read_text().splitlines()[-1] for file in outputs}) == 2
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    check_comment(slurm, first)
    slurm.cancel(first)
    text = slurm.call(
        "salloc", QUARTER, "-w", "n1", "srun", "sh", "-c", 'test -r "$JUPYTER_GPU_SEAT_FILE" && echo seated'
    )
    assert "seated" in text


def test_the_parts_of_a_heterogeneous_job_have_seats_on_their_nodes_and_a_comment_is_one_parts(
    slurm: Cluster, nodes: list[GPUNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = slurm.folder / "parts.sh"
    script.write_text(
        f"#!/bin/sh\n#SBATCH {QUARTER}\n#SBATCH --nodelist=n1\n#SBATCH hetjob\n#SBATCH {HALF}\n#SBATCH --nodelist=n2\nexec sleep 600\n"
    )
    job = slurm.call("sbatch", "--parsable", f"--output={slurm.folder}/parts.out", str(script)).strip()
    found: list[list[int]] = []

    def seated() -> bool:
        found.clear()
        for node in nodes:
            with node.client() as client:
                found.append([seat.fraction_milli for seat in client.seats().seats])
        return found == [[250], [500]]

    until(seated, "each part has its seat")
    until((slurm.folder / "parts.out").exists, "the job runs")
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    check_comment(slurm, job)
    slurm.cancel(job)


def test_each_run_of_a_requeued_job_has_a_seat_of_its_own(slurm: Cluster, nodes: list[GPUNode]) -> None:
    script = 'test -r "$JUPYTER_GPU_SEAT_FILE" && echo "run ${SLURM_RESTART_COUNT:-0} is seated"; exec sleep 600'
    job = slurm.sbatch(script, QUARTER, "-w", "n1", "--requeue", "--open-mode=append")
    until(lambda: "run 0 is seated" in slurm.output(job), "the first run has a seat")
    slurm.call("scontrol", "requeue", job)
    until(lambda: not list(nodes[0].seats.iterdir()), "its seat has ended")
    slurm.await_job(job, "PENDING")
    # Slurm 22.05 runs no Prolog for a run that begins in the second in which the last one ended.
    slurm.call("scontrol", "update", f"jobid={job}", "starttime=now+3")
    until(lambda: "run 1 is seated" in slurm.output(job), "the second run has a seat")
    with nodes[0].client() as client:
        assert [seat.server for seat in client.seats().seats] == [f"slurm-{job}"]
    slurm.cancel(job)


CELL = "import os; open('OUT', 'a').write(f'{bool(os.environ.get(\"JUPYTER_GPU_LEASE\"))} ')"
NOTEBOOK = {
    "cells": [{"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None, "source": CELL}],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}
PAPERMILL = "-m papermill --log-level ERROR --no-progress-bar it.ipynb done.ipynb"


def test_kernels_of_any_program_have_the_share_in_an_environment_with_the_package_and_work_without_it(
    slurm: Cluster, tmp_path: Path
) -> None:
    """Each program starts an ordinary `python3`."""
    for name, ours in (("with", True), ("without", False)):
        new_environment(tmp_path / name, tmp_path / name, ours=ours)
    (tmp_path / "it.ipynb").write_text(json.dumps(NOTEBOOK).replace("OUT", str(tmp_path / "out")))
    lines = [f"{name}/bin/python -P {PAPERMILL}" for name in ("with", "without")]
    script = "\n".join([f"export PYTHONPATH={QUICK}", f"cd {tmp_path}", "set -e", *lines, "echo all ran"])
    job = slurm.sbatch(script, HALF, "-w", "n1", "--mem=900")
    slurm.await_end(job)
    assert slurm.output(job).endswith("all ran\n"), slurm.output(job)
    assert (
        "1/2 GPU for kernels in environments that have jupyter-fractional-gpu; other kernels and programs see no GPU"
        in slurm.output(job)
    )
    assert (tmp_path / "out").read_text() == "True False "


ONDEMAND = ROOT / "examples" / "ondemand"


def test_kernels_of_an_ondemand_session_have_the_share_of_its_form_until_the_session_ends(
    slurm: Cluster, nodes: list[GPUNode], tmp_path: Path
) -> None:
    environment, home = tmp_path / "environment", tmp_path / "home"
    home.mkdir()
    new_environment(environment, environment, ours=True)
    for name in ("share", "etc"):  # JupyterLab's pages, and the server's extensions
        (environment / name).symlink_to(Path(sys.prefix, name))
    script = environment / "bin" / "jupyter-lab"
    script.write_text(f'#!/bin/sh\nexec {environment}/bin/python -P -m jupyterlab --allow-root "$@"\n')
    script.chmod(0o755)
    (environment / "bin" / "node").symlink_to("/bin/false")  # else JupyterLab asks yarn for its registry
    site = f"export HOME={home} PYTHONPATH={QUICK}"
    session = Session(slurm, ONDEMAND, tmp_path / "session", site=site, environment=str(environment), portal=PORTAL)
    connection = session.connection()
    assert (session.folder / "jupyter_server_config.py").stat().st_mode & 0o077 == 0
    browser = Browser(connection, session.view())
    assert browser.page == f"/node/{connection['host']}/{connection['port']}/lab"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        Browser(connection, session.view().replace(connection["password"], "guessed"))

    notebook = browser.start("python3")
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        browser.channel(notebook.kernel_id, "another", "https://other.example.org")
    reply = notebook.run(FILL.format(seed=1, rest=1))
    assert reply.text == "0\n", reply
    node = next(node for node in nodes if node.node.name == slurm.job(session.job)["NodeList"])
    (lease,) = node.status().leases
    assert (lease.state, lease.spec.fraction_milli) == ("resident", 250)
    browser.hang_up()

    browser.request("POST", "api/shutdown")  # JupyterLab's menu
    slurm.await_job(session.job, "COMPLETED")
    until(lambda: not node.lease_states(), "no lease is left")
    until(lambda: not list(node.seats.glob("*")), "no file of a seat is left")
    with node.client() as client:
        assert client.seats().seats == []


def test_an_ondemand_session_whose_server_cannot_start_ends_at_once_and_says_why(
    slurm: Cluster, nodes: list[GPUNode], tmp_path: Path
) -> None:
    session = Session(slurm, ONDEMAND, tmp_path / "session", site=f"export HOME={tmp_path}", environment="/nowhere")
    slurm.await_job(session.job, "FAILED")
    assert "jupyter-lab: not found" in session.output
    assert not (session.folder / "connection.yml").exists()
    until(lambda: not [file for node in nodes for file in node.seats.glob("*")], "no file of a seat is left")


def remote_calls(slurm: Cluster) -> int:
    """Count the users' requests about jobs or partitions that slurmctld has answered, which is what `squeue` sends."""
    text = slurm.call("sdiag").partition("statistics by message type")[2].partition("by user")[0]
    asked = re.findall(r"REQUEST_(?:JOB_INFO\w*|PARTITION_INFO|FED_INFO)\s.*count:(\d+)", text)
    return sum(map(int, asked))


def test_a_job_costs_slurmctld_one_question_at_most_and_none_in_another_partition(
    slurm: Cluster, nodes: list[GPUNode]
) -> None:
    for node in nodes:
        node.stop_agent()
    script = slurm.folder / "scripts" / "n1" / "prolog"
    text = script.read_text()
    costs = {}
    try:
        for others in (False, True):
            if others:
                slurm.call(*nodes[0].main, "node", "install", "--force", "--folder", str(script.parent), "--node", "n1",
                           *nodes[0].words, "--partition", "others", environment=nodes[0].environment)  # fmt: skip
            for gres in ("", HALF):
                before = remote_calls(slurm)
                job = slurm.sbatch("true", "-w", "n1", *([gres] if gres else []))
                until((slurm.folder / f"job-{job}.out").exists, "it has run")
                until(lambda: not list(nodes[0].seats.glob("job-*")), "and has ended")
                costs[others, bool(gres)] = remote_calls(slurm) - before
    finally:
        script.write_text(text)
        for node in nodes:
            node.start_agent()
    assert costs == {(False, False): 2, (False, True): 2, (True, False): 0, (True, True): 0}


def test_a_job_is_told_that_it_has_no_share_because_the_disk_of_seats_is_full(
    slurm: Cluster, nodes: list[GPUNode]
) -> None:
    seats = nodes[0].seats
    seats.mkdir(mode=0o711, exist_ok=True)
    slurm.call("mount", "-t", "tmpfs", "-o", "size=64k,mode=711", "none", str(seats))
    try:
        with (seats / "filler").open("wb") as filler, suppress(OSError):
            filler.write(bytes(1 << 20))
            filler.flush()
        job = slurm.sbatch('echo "<$CUDA_VISIBLE_DEVICES>"', HALF, "-w", "n1")
        slurm.await_job(job, "COMPLETED")
        assert slurm.output(job) == (
            f"jupyter gpu: this job has no GPU share: the disk that holds {seats}/job-{job}.env is full\n<>\n"
        )
    finally:
        slurm.cancel_all()
        slurm.call("umount", str(seats))


def test_once_writes_at_once_and_says_what(slurm: Cluster, nodes: list[GPUNode]) -> None:
    node = nodes[0]
    words = ["--node", "n1", "--once", "--json", *node.words]
    text = slurm.call(*node.main, "node", "agent", "--engine", "slurm", *words, environment=node.environment)
    written = json.loads(text)
    assert written["counts"] == {GRES: 1000}
    assert written["summary"]["pools"][0]["name"] == "default"


def test_the_doctor_names_what_is_wrong_and_what_to_change(slurm: Cluster, nodes: list[GPUNode]) -> None:
    node = nodes[0]
    command = [*node.main, "node", "doctor", "--json", "--node", "n1", *node.words]
    text = slurm.call("sh", "-c", '"$@"; echo "code $?"', "sh", *command, environment=node.environment)
    report, _, code = text.partition("code ")
    findings = {one["check"]: one for one in json.loads(report)["findings"]}
    assert code.strip() == "1"
    assert findings["slurm.conf"]["severity"] == "error"  # this Slurm has no control groups
    assert "-ProctrackType=proctrack/linuxproc; " in findings["slurm.conf"]["finding"]
    assert "+ProctrackType=proctrack/cgroup; " in findings["slurm.conf"]["finding"]
    for check in ("scripts", "gres.conf", "counts", "agent", "seats"):
        assert findings[check]["severity"] == "ok", findings[check]


def test_sigterm_ends_the_agent_and_leaves_the_counts(slurm: Cluster, nodes: list[GPUNode]) -> None:
    before = slurm.opened_milli("n1")
    assert nodes[0].stop_agent() == 0
    assert slurm.opened_milli("n1") == before
    assert "the counts stay as they are" in nodes[0].log()
    nodes[0].start_agent()
