"""A real Slurm with control groups, as root: which job has a seat, what it may reach, and what is left however it ends.

On its other node two users of a real hub have jobs, and their kernels take turns; `python -m tests.engines.hub_story` plays ten turns.
"""

import os
import pwd
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

HALF = f"--gres={GRES}:open:500"
NOBODY = pwd.getpwnam("nobody")
# Only 32 MiB of a kernel's memory is compared, as that takes processor time. All of it has pages, which control
# groups count.
FILL = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import device; gpu = device.open(); "
    "data = gpu.fill(seed={seed}, size=32 * 2**20); rest = gpu.backend.cuda.allocate(({mib} - 32) * 2**20); rest.fill(b'x'); "
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
    with gpu_nodes(slurm, only=["n1"]) as made:
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


def seat_of(node: GPUNode, job: str) -> str:
    with node.client() as client:
        return next(seat.seat_id for seat in client.seats().seats if seat.server == f"slurm-{job}")


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


def test_two_jobs_of_one_user_cannot_use_each_others_seat(slurm: Cluster, nodes: list[GPUNode]) -> None:
    first = slurm.sbatch("exec sleep 600", HALF, "-w", "n1")
    slurm.await_job(first, "RUNNING")
    file = nodes[0].seats / f"job-{first}.json"
    until(file.exists, "the first job has its seat")
    other = JobKernel(slurm.folder / "foreign")
    job = slurm.sbatch(f"export JUPYTER_GPU_SEAT_FILE={file}; {other.command}", HALF, "-w", "n1", "--mem=1600")
    slurm.await_job(job, "RUNNING")
    assert "Error" in other.cell(FILL.format(seed=9, mib=64))
    assert f"this seat belongs to Slurm job {first}, and the requesting process runs in Slurm job {job}" in nodes[
        0
    ].log("broker.out")
    assert {lease.spec.seat for lease in nodes[0].status().leases} <= {seat_of(nodes[0], first)}


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
    for mem in ("--mem=1300", "--mem-per-cpu=325"):
        job = slurm.sbatch(
            "echo $JUPYTER_GPU_DEFAULT_FRACTION; exec sleep 600", HALF, "-w", "n1", mem, "--cpus-per-task=4"
        )
        until(lambda: slurm.output(job).endswith("\n250m\n"), "its kernels' share is smaller")  # noqa: B023 - called at once
        assert (
            "this job's share is 1/4 GPU instead of 1/2: the job has 1300 MiB of memory, less than the 1024 MiB that a kernel uses "
            "plus the 512 MiB of GPU memory saved there while it is idle; ask for --mem=1536M"
        ) in slurm.output(job)
        with nodes[0].client() as client:
            assert [(seat.fraction_milli, seat.warning) for seat in client.seats().seats] == [(250, "")]
        slurm.cancel(job)


def test_a_site_may_refuse_a_share_that_the_jobs_memory_cannot_hold(slurm: Cluster, nodes: list[GPUNode]) -> None:
    with short_memory(slurm, nodes[0], "refuse"):
        job = slurm.sbatch('echo "<$JUPYTER_GPU_SEAT_FILE>"', HALF, "-w", "n1", "--mem=1300")
        slurm.await_job(job, "COMPLETED")
    assert "this job has no GPU share: the job has 1300 MiB of memory" in slurm.output(job)
    assert slurm.output(job).endswith("\n<>\n")
    assert not seats(nodes[0])


def test_a_memory_limit_that_is_too_small_is_named_to_all_and_a_job_that_it_kills_leaves_nothing(
    slurm: Cluster, nodes: list[GPUNode]
) -> None:
    with short_memory(slurm, nodes[0], "allow"):
        kernel, job = started(slurm, "small", "400")
        assert kernel.cell(FILL.format(seed=1, mib=320)) == "0\n"
    with nodes[0].client() as client:
        (seat,) = client.seats().seats
        assert f"job_{job}" in seat.warning
        lease = only_lease(nodes[0])
        with pytest.raises(ConflictError, match=f"job_{job}"):
            client.suspend(lease.lease_id)
    neighbour, _ = started(slurm, "neighbour", "3000", gres=f"--gres={GRES}:open:1000")
    neighbour.start_cell(FILL.format(seed=2, mib=700))
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


def test_a_job_that_is_cancelled_in_the_middle_of_a_swap_leaves_nothing_and_hurts_no_neighbour(
    slurm: Cluster, nodes: list[GPUNode]
) -> None:
    leaving, job = started(slurm, "leaving", "1600")
    staying, _ = started(slurm, "staying", "1600")
    assert leaving.cell(FILL.format(seed=3, mib=320)) == "0\n"
    assert staying.cell(FILL.format(seed=4, mib=320)) == "0\n"
    pushing, _ = started(slurm, "pushing", "1600")
    pushing.start_cell(FILL.format(seed=5, mib=320))
    until(lambda: "suspending" in nodes[0].lease_states() or "suspended" in nodes[0].lease_states(), "a swap begins")
    slurm.cancel(job)
    assert staying.cell(CHECK) == "0\n"
    assert pushing.cell(CHECK) == "0\n"
    until(lambda: len(nodes[0].status().leases) == 2, "the cancelled job's lease is gone")


def test_brokers_and_agents_that_die_drain_no_node_and_lose_no_job(slurm: Cluster, nodes: list[GPUNode]) -> None:
    node = nodes[0]
    kernel, _ = started(slurm, "outliving", "1600")
    assert kernel.cell(FILL.format(seed=6, mib=64)) == "0\n"
    assert node.agent is not None
    node.agent.kill()
    node.agent.wait()
    node.stop_broker(signal.SIGKILL)
    job = slurm.sbatch("echo ran", HALF, "-w", "n1")
    slurm.await_job(job, "COMPLETED")
    assert slurm.output(job).endswith("ran\n")
    node.start_broker()
    node.start_agent()
    assert kernel.cell(CHECK) == "0\n"


def test_a_full_disk_under_the_log_drains_no_node(slurm: Cluster, nodes: list[GPUNode]) -> None:
    environment = {**nodes[0].environment, "SLURM_JOB_ID": "999999", "SLURMD_NODENAME": "n1"}
    for name in ("prolog", "epilog"):
        slurm.call(*nodes[0].main, "node", name, "--log", "/dev/full", *nodes[0].words, environment=environment)


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
    story: Story,
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
    until(lambda: not story.jobs(), "no job is left")
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
                scripts=lambda nodes: install_scripts(nodes, os.environ, *shards),
                node_gres="gpu:2,shard:8",
                gres=gres,
            ) as slurm,
            gpu_nodes(slurm, more=shards, simulate="2x1GiB", only=["n1"]) as nodes,
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
