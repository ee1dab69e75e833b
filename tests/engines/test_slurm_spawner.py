"""The Slurm spawner with a real Slurm of two nodes: what it asks for, shows, survives and leaves behind."""

import asyncio
import os
import pwd
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from batchspawner import JobStatus
from tornado import web

from fractional_gpu.protocol.nodes import NodeSummary, PoolSummary, encode_summary
from fractional_gpu_hub.engines import slurm_commands
from fractional_gpu_hub.engines.slurm import FractionalGPUSlurmSpawner
from fractional_gpu_hub.engines.slurm_commands import NODES, jobs_named
from tests.support.slurm import Cluster, new_cluster
from tests.support.stopping import stop

pytestmark = pytest.mark.promise("slurm-hub")

PATIENCE_S = 60
POOL = PoolSummary(
    name="default", devices=1, total_milli=1000, held_milli=0, admissible_milli=1000, fraction_milli=250,
    fractions_milli=[250, 500], device_mib=400, count="jgpu:open",
)  # fmt: skip


@pytest.fixture(scope="module")
def _cluster() -> Iterator[Cluster]:
    with new_cluster(closed=0) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, _cluster.environment[name])
    for node in _cluster.nodes:
        publish(_cluster, node.name)
    monkeypatch.setattr(NODES, "_read_s", None)
    yield _cluster
    _cluster.cancel(*_cluster.call("squeue", "-h", "-o", "%i").split())


def publish(cluster: Cluster, node: str, **more: Any) -> None:  # noqa: ANN401 - fields
    import time  # noqa: PLC0415 - here only

    summary = NodeSummary(at_s=int(time.time()), simulated=True, pools=[POOL], **more)
    cluster.call("scontrol", "update", f"nodename={node}", f"extra={encode_summary(summary)}")


class Database:
    commits = 0

    def commit(self) -> None:
        self.commits += 1


def made(cluster: Cluster, server: str = "", **traits: Any) -> Any:  # noqa: ANN401 - an untyped spawner
    """A spawner of the user running the tests, whose server is a process that stays until it is ended."""
    name = pwd.getpwuid(os.getuid()).pw_name
    user = SimpleNamespace(name=name, groups=[], id=7, url="/user/x/", escaped_name=name, spawners={})
    hub = SimpleNamespace(public_host="", api_url="http://127.0.0.1:1/hub/api", base_url="/hub/")
    orm = SimpleNamespace(state=None, user_options=None, name=server, server=None)
    spawner: Any = FractionalGPUSlurmSpawner(
        user=user, hub=hub, orm_spawner=orm, exec_prefix="", cmd=["600"], startup_poll_interval=0.1,
        batchspawner_singleuser_cmd="sleep", gpu_filter_kernels=False, req_srun="", gpu_base_memory="100MiB", **traits,
    )  # fmt: skip
    spawner.db, spawner.mock_port = Database(), 4321
    spawner.user_options = {"pool": "default", "fraction": "1/4"}
    spawner.oauth_client_id, spawner.oauth_client_allowed_scopes = "test", []
    spawner.set_trait("api_token", "-")
    spawner.set_trait("req_homedir", str(cluster.folder))
    spawner.public_url = spawner.public_hub_url = ""
    return spawner


async def until_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - Slurm signals nothing
            await asyncio.sleep(0.05)


def messages(spawner: Any) -> list[str]:  # noqa: ANN401 - as above
    return [event["message"] for event in spawner._gpu_progress._events]


async def test_a_choice_becomes_a_job_and_the_job_a_server(cluster: Cluster) -> None:
    spawner = made(cluster)
    form = await spawner.get_options_form()
    assert "2 nodes with 2 GPUs; 0 of 2 GPUs are held, 2 are available now" in form
    assert "1/4 GPU, 100 MiB" in form
    assert await spawner.start() == ("127.0.0.1", 4321), "the node's address, which is not its name"
    job = cluster.job(spawner.job_id)
    assert (job["JobState"], job["Partition"], job["TresPerNode"]) == ("RUNNING", "gpu", "gres:jgpu:open:250")
    assert job["MinMemoryNode"] == "200M", "the server's own 100 MiB, and all that can be saved"
    assert job["Requeue"] == "0"
    assert spawner.orm_spawner.state["job_id"] == spawner.job_id
    assert await spawner.poll() is None
    await spawner.stop()
    assert await spawner.poll() == 1
    assert cluster.job(job["JobId"])["JobState"] == "CANCELLED"


async def test_the_wait_in_the_queue_is_shown_with_its_reason(cluster: Cluster) -> None:
    holder = cluster.sbatch("sleep 600", "--gres=jgpu:open:1000", "--nodes=2", "--time=5")
    cluster.await_job(holder, "RUNNING")
    spawner = made(cluster)
    start = asyncio.create_task(spawner.start())
    await until_true(lambda: any("(Resources)" in text for text in messages(spawner)))
    assert await spawner.poll() is None, "a job in the queue is no ended server"
    cluster.cancel(holder)
    async with asyncio.timeout(PATIENCE_S):
        await start
    said = messages(spawner)
    assert any(
        text.startswith(f"Job {spawner.job_id} is waiting in Slurm's queue: no node has enough free resources")
        for text in said
    )
    assert said[-1] == "The cluster has started your server, with 1/4 GPU of pool default"


async def test_a_job_whose_number_was_never_saved_is_found_and_ended(cluster: Cluster) -> None:
    first = made(cluster)
    await first.start()
    second = made(cluster)  # a hub that died in between knows nothing
    await second.start()
    assert cluster.await_job(first.job_id, "CANCELLED")
    other = made(cluster, server="other")
    other._gpu_begun = True  # it was cancelled while sbatch ran
    assert await other.poll() == 1
    forgetful = made(cluster)
    forgetful._gpu_begun = True
    assert await forgetful.poll() is None
    await forgetful.stop()
    assert forgetful.job_id == second.job_id
    assert cluster.await_job(second.job_id, "CANCELLED")
    assert await jobs_named([], second.gpu_job_name, second.user.name) == []


async def test_a_controller_that_does_not_answer_ends_no_server(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = made(cluster, gpu_stop_wait=0)
    await spawner.start()
    pid = int((cluster.folder / "slurmctld.pid").read_text())
    stop(pid)
    try:
        monkeypatch.setattr(slurm_commands, "TIMEOUT_S", 0.5)
        assert await spawner.query_job_status() == JobStatus.UNKNOWN
        assert await spawner.poll() is None
        fresh = made(cluster, server="fresh")
        with pytest.raises(web.HTTPError) as refusal:
            await fresh.start()
        assert refusal.value.status_code == 503
        await spawner.stop()  # it is tried again when the controller answers
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    await until_true(lambda: cluster.job(spawner.job_id)["JobState"] == "CANCELLED")


@pytest.mark.parametrize("broken", ["munge", "sudo"])
async def test_what_else_fails_ends_no_server(cluster: Cluster, broken: str) -> None:
    spawner = made(cluster)
    await spawner.start()
    if broken == "munge":
        (cluster.folder / "munge.socket").rename(cluster.folder / "munge.gone")
    else:
        spawner.exec_prefix = "/bin/false"
    try:
        assert await spawner.query_job_status() == JobStatus.UNKNOWN
        assert await spawner.poll() is None
    finally:
        with suppress(FileNotFoundError):
            (cluster.folder / "munge.gone").rename(cluster.folder / "munge.socket")
    spawner.exec_prefix = ""
    await spawner.stop()


@pytest.mark.parametrize("how", ["at once", "after a while"])
async def test_a_server_that_dies_before_it_serves_says_so_at_once(cluster: Cluster, how: str) -> None:
    spawner = made(cluster)
    if how == "at once":
        spawner.cmd = ["nonsense"]
    del spawner.mock_port  # the port never comes
    start = asyncio.create_task(spawner.start())
    if how != "at once":
        await until_true(lambda: any("started on n" in text for text in messages(spawner)))
        cluster.call("scancel", spawner.job_id)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(web.HTTPError) as refusal:
            await start
    assert "see its log in your home folder" in message_of(refusal.value)
    assert await spawner.poll() == 1


def message_of(error: Any) -> str:  # noqa: ANN401 - of JupyterHub 5 or 6
    return str(error.jupyterhub_message)
