"""A real Slurm with control groups, as root: which job has a seat, what it may reach, and what is left however it ends.

On its other node two users of a real hub have jobs, and their kernels take turns; `python -m tests.engines.hub_story` plays ten turns.
"""

import os
import pwd
import shlex
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.protocol.errors import ConflictError
from fractional_gpu.protocol.nodes import parse_summary
from fractional_gpu.protocol.status import LeaseStatus
from tests.engines.hub_story import USERS, Story, new_story, story_cluster
from tests.hub.pages import Visitor
from tests.support.paths import PYTHONPATH, ROOT
from tests.support.service_page import Member
from tests.support.slurm import GRES, Cluster, new_cluster
from tests.support.slurm_job import JobKernel
from tests.support.slurm_nodes import GPUNode, gpu_nodes, install_scripts
from tests.support.world import until

pytestmark = pytest.mark.promise("slurm")

HALF, WHOLE = f"--gres={GRES}:open:500", f"--gres={GRES}:open:1000"
NOBODY = pwd.getpwnam("nobody")
IDLE, BUSY = "1%", "100%"
CONFIG = """
c.GPUBroker.pools = {"default": {"fractions": ["1/4", "1/2", "1"], "oversubscription": 4, "expected_use": "1%"}}
"""
# Only 16 MiB of a kernel's memory is compared, as that takes processor time. All of it has pages, which control
# groups count.
FILL = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import device; gpu = device.open(); "
    "data = gpu.fill(seed={seed}, size=16 * 2**20); rest = gpu.backend.cuda.allocate(({mib} - 16) * 2**20); rest.fill(b'x'); "
    "data.step(); print(data.wrong_bytes())"
)
CHECK = "data.step(); print(data.wrong_bytes())"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        with story_cluster() as cluster:
            yield cluster


@pytest.fixture(scope="module")
def nodes(slurm: Cluster) -> Iterator[list[GPUNode]]:
    with gpu_nodes(slurm, simulate="1x256MiB", config=CONFIG, only=["n1"]) as made:
        until(lambda: slurm.opened_milli("n1") > 1000, "n1 is open for more than its device")
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(slurm: Cluster, nodes: list[GPUNode]) -> Iterator[None]:
    """After each test: no lease, no seat, no file, no process of a job, and no drained node."""
    yield
    slurm.cancel_all()
    until(lambda: not nodes[0].lease_states(), "no lease is left")
    until(lambda: not nodes[0].seats.exists() or not list(nodes[0].seats.iterdir()), "no file of a seat is left")
    until(lambda: not seats(nodes[0]), "no seat is left")
    until(lambda: not job_processes(slurm), "no process of a job is left")
    assert set(slurm.states().values()) == {"idle"}, slurm.call("sinfo", "-R")


def seats(node: GPUNode) -> list[str]:
    with node.client() as client:
        return [seat.server for seat in client.seats().seats]


def share(node: GPUNode, use: str) -> None:
    """Tell the node's pool how much of the time its users compute: the forecast of how many it admits follows from that."""
    with node.client() as client:
        client.change_pool("default", {"expected_use": use})


def job_processes(slurm: Cluster) -> list[int]:
    """Return the processes in the control groups of this cluster's jobs."""
    found = []
    for group, _, files in os.walk("/sys/fs/cgroup"):  # unlike `Path.glob`, it skips what disappears meanwhile
        number = next((int(part[4:]) for part in group.split("/") if part.startswith("job_")), 0)
        if "cgroup.procs" in files and slurm.first_job <= number < slurm.first_job + 1000:
            with suppress(FileNotFoundError, ProcessLookupError):
                found += [int(pid) for pid in Path(group, "cgroup.procs").read_text().split()]
    return found


def started(slurm: Cluster, name: str, mem: str = "1600", gres: str = HALF) -> tuple[JobKernel, str]:
    kernel = JobKernel(slurm.folder / name)
    job = slurm.sbatch(kernel.command, gres, "-w", "n1", f"--mem={mem}")
    slurm.await_job(job, "RUNNING")
    return kernel, job


def only_lease(node: GPUNode) -> LeaseStatus:
    (lease,) = node.status().leases
    return lease


def test_a_jobs_seat_is_for_its_user_and_others_cannot_read_it(slurm: Cluster, nodes: list[GPUNode]) -> None:
    slurm.folder.chmod(0o777)
    script = 'env | grep -E "^(JUPYTER|CUDA)"; cat "$JUPYTER_GPU_SEAT_FILE" >/dev/null && echo mine; exec sleep 600'
    job = slurm.sbatch(script, HALF, "-w", "n1", "--chdir=/tmp", user=NOBODY.pw_uid)
    slurm.await_job(job, "RUNNING")
    until(lambda: "mine" in slurm.output(job), "the job reads its seat")
    said = dict(line.split("=", 1) for line in slurm.output(job).splitlines() if "=" in line)
    assert said["CUDA_VISIBLE_DEVICES"] == ""
    assert said["JUPYTER_GPU_SOCKET"] == nodes[0].node.socket
    assert said["JUPYTER_GPU_DEFAULT_FRACTION"] == "500m"
    file = Path(said["JUPYTER_GPU_SEAT_FILE"])
    assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (NOBODY.pw_uid, 0o600)
    with nodes[0].client() as client:
        (seat,) = client.seats().seats
    assert (seat.owner, seat.uid, seat.admitted) == ("nobody", NOBODY.pw_uid, True)
    assert seat.workload is not None
    assert (seat.workload.engine, seat.workload.id) == ("slurm", job)
    daemon = pwd.getpwnam("daemon").pw_uid
    read = subprocess.run(
        ["cat", str(file)], user=daemon, group=daemon, extra_groups=[], capture_output=True, check=False
    )
    assert b"Permission denied" in read.stderr
    listed = subprocess.run(
        ["ls", str(file.parent)], user=daemon, group=daemon, extra_groups=[], capture_output=True, check=False
    )
    assert b"Permission denied" in listed.stderr


@contextmanager
def short_memory(slurm: Cluster, node: GPUNode, choice: str) -> Iterator[None]:
    """During the block, the site has this policy for jobs with too little memory."""
    script = slurm.folder / "scripts" / "n1" / "prolog"
    text = script.read_text()
    words = ["install", "--force", "--folder", str(script.parent), "--node", "n1", "--short-memory", choice]
    slurm.call(*node.main, "node", *words, *node.words, environment=node.environment)
    yield
    script.write_text(text)


def test_a_share_that_the_jobs_memory_cannot_hold_becomes_the_largest_that_it_can(
    slurm: Cluster, nodes: list[GPUNode]
) -> None:
    """The Prolog runs before the job has a control group, so the memory requested from Slurm counts."""
    script = "echo $JUPYTER_GPU_DEFAULT_FRACTION; exec sleep 600"
    job = slurm.sbatch(script, HALF, "-w", "n1", "--mem-per-cpu=275", "--cpus-per-task=4")
    until(lambda: slurm.output(job).endswith("\n250m\n"), "its kernels' share is smaller")
    assert (
        "this job's share is 1/4 GPU instead of 1/2: the job has 1100 MiB of memory, less than the 1024 MiB that a kernel uses "
        "plus the 128 MiB of GPU memory saved there while it is idle; ask for --mem=1152M"
    ) in slurm.output(job)
    with nodes[0].client() as client:
        assert [(seat.fraction_milli, seat.warning) for seat in client.seats().seats] == [(250, "")]


def test_a_site_may_refuse_a_share_that_the_jobs_memory_cannot_hold(slurm: Cluster, nodes: list[GPUNode]) -> None:
    with short_memory(slurm, nodes[0], "refuse"):
        job = slurm.sbatch('echo "<$JUPYTER_GPU_SEAT_FILE>"', HALF, "-w", "n1", "--mem=1100")
        slurm.await_job(job, "COMPLETED")
    assert "this job has no GPU share: the job has 1100 MiB of memory" in slurm.output(job)
    assert slurm.output(job).endswith("\n<>\n")
    assert not seats(nodes[0])


def test_a_memory_limit_that_is_too_small_is_named_to_all_and_a_job_that_it_kills_leaves_nothing(
    slurm: Cluster, nodes: list[GPUNode]
) -> None:
    with short_memory(slurm, nodes[0], "allow"):
        kernel, job = started(slurm, "small", "300", WHOLE)
        assert kernel.cell(FILL.format(seed=1, mib=200)) == "0\n"
    with nodes[0].client() as client:
        (seat,) = client.seats().seats
        assert f"job_{job}" in seat.warning
        lease = only_lease(nodes[0])
        with pytest.raises(ConflictError, match=f"job_{job}"):
            client.suspend(lease.lease_id)
    neighbour, _ = started(slurm, "neighbour")
    neighbour.start_cell(FILL.format(seed=2, mib=90))
    until(
        lambda: any(
            "could not be suspended" in one.sentence and f"job_{job}" in one.sentence
            for one in nodes[0].status().leases
        ),
        "the neighbour is told what keeps the GPU",
    )
    assert kernel.cell(CHECK) == "0\n"
    kernel.start_cell("hoard = bytearray(1 << 30); hoard[::4096] = b'x' * len(hoard[::4096])")
    until(lambda: any(one.pid is None for one in nodes[0].status().leases), "the kernel is killed")
    slurm.cancel(job)


def state_of(node: GPUNode, job: str) -> str:
    """Return the state of this job's only lease."""
    with node.client() as client:
        (seat,) = [seat for seat in client.seats().seats if seat.server == f"slurm-{job}"]
        (lease,) = [lease for lease in client.status().leases if lease.spec.seat == seat.seat_id]
    return lease.state


def test_a_third_job_is_admitted_because_others_idle_and_no_byte_is_lost_though_one_is_cancelled_in_a_swap_and_broker_and_agent_die(
    slurm: Cluster, nodes: list[GPUNode]
) -> None:
    node = nodes[0]
    share(node, BUSY)
    until(lambda: slurm.opened_milli("n1") == 1000, "n1 is open for its device", pause_s=0.1)
    (staying, first), (leaving, second) = started(slurm, "staying"), started(slurm, "leaving")
    assert [kernel.cell(FILL.format(seed=seed, mib=90)) for seed, kernel in enumerate((staying, leaving))] == [
        "0\n"
    ] * 2
    assert node.lease_states() == ["resident", "resident"]

    # Only now: kernels that start look idle, and the node might admit it among them.
    pushing = JobKernel(slurm.folder / "pushing")
    foreign = f"JUPYTER_GPU_SEAT_FILE={node.seats}/job-{first}.json {shlex.join(node.main)} run --wait 0 -- echo ran"
    third = slurm.sbatch(f"{foreign}; {pushing.command}", HALF, "-w", "n1", "--mem=1600")
    share(node, IDLE)
    assert pushing.cell(FILL.format(seed=3, mib=90)) == "0\n"
    theirs = f"this seat belongs to Slurm job {first}, and the requesting process runs in Slurm job {third}"
    assert theirs in slurm.output(third)
    assert "ran" not in slurm.output(third).splitlines()

    assert [kernel.cell(CHECK) for kernel in (staying, leaving, pushing)] == ["0\n"] * 3
    before = until(lambda: states if "suspended" in (states := node.lease_states()) else None, "one is suspended")
    assert before == ["resident", "resident", "suspended"]
    assert state_of(node, second) == "resident"
    out = staying.start_cell(CHECK)
    until(lambda: state_of(node, second) != "resident", "its swap begins")
    slurm.cancel(second)
    until(out.exists, "the cell ends")
    assert out.read_text() == "0\n"
    until(lambda: len(node.status().leases) == 2, "the cancelled job's lease is gone")
    with node.client() as client:
        assert {seat.server for seat in client.seats().seats} == {f"slurm-{job}" for job in (first, third)}

    def commented() -> bool:
        return "AdminComment=jupyter-gpu: kernels=1 reserved=" in slurm.call("scontrol", "show", "job", "-o", first)

    until(commented, "the meter's figures are in the job's comment", pause_s=0.1)
    assert node.agent is not None
    node.agent.kill()
    node.agent.wait()
    node.stop_broker(signal.SIGKILL)
    job = slurm.sbatch("echo ran", HALF, "-w", "n1")
    slurm.await_job(job, "COMPLETED")
    assert slurm.output(job).endswith("ran\n")
    node.start_broker()
    node.start_agent()
    assert [staying.cell(CHECK), pushing.cell(CHECK)] == ["0\n"] * 2
    for kernel, ended in ((staying, first), (pushing, third)):
        kernel.end()
        slurm.await_job(ended, "COMPLETED")
    until(lambda: not node.lease_states(), "no lease is left")
    until(lambda: not list(node.seats.iterdir()), "no file of a seat is left")
    with node.client() as client:
        assert client.seats().seats == []


def _cluster_page(story: Story, name: str) -> dict[str, Any] | None:
    view = Member(story.hub, name).status()
    return None if view["problem"] else view


@pytest.fixture
def story(slurm: Cluster) -> Iterator[Story]:
    with new_story(slurm, page={"admins": [USERS[0]], "cluster": "slurm"}) as story:
        yield story


@pytest.mark.timeout(600)
@pytest.mark.promise("slurm-hub")
def test_two_users_of_a_hub_share_a_nodes_device_and_no_byte_is_wrong_nor_does_a_killed_hub_change_that(
    slurm: Cluster, story: Story
) -> None:
    """Resident bytes of the simulated device are not charged to the jobs, saved ones are."""
    page = Visitor(story.hub, story.readers[0].name).get("hub/spawn")
    assert "2 nodes with 2 GPUs" in page.text
    assert "default/750" in page.choices
    story.begin(mib=16)
    jobs = story.jobs()
    assert {job["UserId"].partition("(")[0] for job in jobs} == {reader.name for reader in story.readers}
    assert {job["NodeList"] for job in jobs} == {"n2"}
    assert {job["TresPerNode"] for job in jobs} == {"gres:jgpu:open:750"}
    story.turn()
    seen = {name: until(partial(_cluster_page, story, name), f"{name} sees the cluster") for name in USERS}
    assert {row["name"]: row["state"] for row in seen[USERS[0]]["nodes"]} == {"n1": "in service", "n2": "in service"}
    shown = [(row["owner"], row["share"], row["node"]) for row in seen[USERS[0]]["servers"]]
    assert shown == [(name, "3/4 GPU", "n2") for name in sorted(USERS)]
    assert [row["owner"] for row in seen[USERS[1]]["servers"]] == [USERS[1]], "a user sees their own"
    story.restart_hub()
    story.turn()
    story.check()
    for reader in story.readers:
        story.hub.stop(reader.name)
    until(lambda: not slurm.call("squeue", "-h"), "no job is left", pause_s=0.1)
    until(lambda: not story.node.status().leases, "no lease is left")


def test_shards_are_pinned_to_the_gpu_that_slurm_chose(tmp_path: Path) -> None:
    """Slurm's own gres/shard: each job is fenced to one device, and its seat stays there. Counts are not changed."""
    for number in (0, 1):
        os.mknod(tmp_path / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(195, number))
    tmp_path.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        shards = ("--shards", "default")
        gres = {"gpu": f"Name=gpu File={tmp_path}/nvidia[0-1]", "shard": "Name=shard Count=8"}
        with (
            new_cluster(
                constrained=True,
                scripts=lambda nodes: install_scripts(nodes[:1], os.environ, *shards),
                node_gres="gpu:2,shard:8",
                gres=gres,
            ) as slurm,
            gpu_nodes(slurm, more=shards, simulate="2x256MiB", only=["n1"]) as nodes,
        ):
            probe = f'for n in 0 1; do echo "$n: $(cat {tmp_path}/nvidia$n 2>&1)"; done; cat $JUPYTER_GPU_SEAT_FILE; exec sleep 600'
            job = slurm.sbatch(probe, "--gres=shard:2", "-w", "n1")
            slurm.await_job(job, "RUNNING")
            until(lambda: "seat_id" in slurm.output(job), "the job has a seat")
            said = slurm.output(job)
            with nodes[0].client() as client:
                (seat,) = client.seats().seats
                devices = {device.index: device.device_id for device in client.status().devices}
            assert seat.fraction_milli == 500
            lines = {int(line[0]): line for line in said.splitlines() if line[:3] in ("0: ", "1: ")}
            allowed = [
                number for number, line in lines.items() if "No such device" in line
            ]  # there is no driver behind it
            assert len(allowed) == 1, said
            assert "Operation not permitted" in said
            assert seat.allowed_devices == (devices[allowed[0]],)

            def published() -> bool:
                text = slurm.node("n1").get("Extra", "")
                return bool(text) and parse_summary(text).pools[0].held_milli == 500

            until(published, "the summary has the seat")
            assert "shard:8" in slurm.node("n1")["Gres"]
