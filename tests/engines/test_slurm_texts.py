"""How the output of Slurm's commands is parsed. The texts were printed by Slurm 22.05.8."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.engines.engine import EngineError, EngineUnavailableError, NodeRecord, NodeWrite
from fractional_gpu.engines.job_seats import JobSeat, job_of, share_of_job
from fractional_gpu.engines.slurm import Slurm, SlurmJob, parse_gres
from fractional_gpu.protocol.messages import Workload
from fractional_gpu.protocol.status import SeatStatus

NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=2 Gres=jgpu:open:1000,jgpu:closed:3000,gpu:a100:2(S:0) GresDrain=N/A "
    "GresUsed=jgpu:open:600,jgpu:closed:0,gpu:a100:1(IDX:0) NodeAddr=127.0.0.1 State=MIXED Partitions=gpu  Extra={} \n"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Slurm's commands, which print the file `said`, exit with the status in `code`, and record their arguments.

    If there is a file `said.COMMAND`, that command prints it instead.
    """
    for name in ("scontrol", "squeue", "sacct", "sacctmgr"):
        script = tmp_path / name
        script.write_text(
            f'#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done >{tmp_path}/given\ncp {tmp_path}/given {tmp_path}/given.{name}\n'
            f"if [ -e {tmp_path}/said.{name} ]; then cat {tmp_path}/said.{name}; exit 0; fi\n"
            f"cat {tmp_path}/said; cat {tmp_path}/wrong >&2\nexit $(cat {tmp_path}/code)\n"
        )
        script.chmod(0o755)
    answer(tmp_path, "")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Slurm("n1")


def answer(folder: Path, said: str, wrong: str = "", code: int = 0) -> None:
    (folder / "said").write_text(said)
    (folder / "wrong").write_text(wrong)
    (folder / "code").write_text(str(code))


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("(null)", {}),
        ("", {}),
        ("gres:jgpu:open:250", {"jgpu:open": 250}),
        ("gres:jgpu", {"jgpu": 1}),
        ("gres/jgpu:open=250", {"jgpu:open": 250}),
        ("gres:shard:2,gres:jgpu:3", {"shard": 2, "jgpu": 3}),
        ("jgpu:open:350,gpu:1,shard:(null):0(IDX:N/A)", {"jgpu:open": 350, "gpu": 1, "shard": 0}),
        ("gpu:a100:2(IDX:0-1,3),gpu:v100:1", {"gpu:a100": 2, "gpu:v100": 1}),
        ("jgpu:open:1k", {"jgpu:open": 1024}),
        ("gpu:2080ti:4(S:0-1),gpu:3090:2(IDX:0,1),gpu:4", {"gpu:2080ti": 4, "gpu:3090": 2, "gpu": 4}),
        ("gres/gpu:1g.10gb=2,gres:gpu:2080ti", {"gpu:1g.10gb": 2, "gpu:2080ti": 1}),
        ("bandwidth:lustre:no_consume:4G,seats:no_consume:2", {"bandwidth:lustre": 4 << 30, "seats": 2}),
    ],
)
def test_counts_of_a_text(text: str, counts: dict[str, int]) -> None:
    assert parse_gres(text) == counts


@given(st.text(max_size=40))
def test_any_text_is_counts_or_refused(text: str) -> None:
    with suppress(EngineError):  # and nothing else
        assert all(count >= 0 for count in parse_gres(text).values())


def test_a_nodes_record(slurm: Slurm, tmp_path: Path) -> None:
    answer(tmp_path, NODE)
    record = slurm.read_node()
    assert (record.counts, record.in_use, record.most) == ({"jgpu": 1000}, {"jgpu": 600}, {"jgpu": 4000})


def test_a_write_names_every_resource_and_keeps_the_sum(slurm: Slurm, tmp_path: Path) -> None:
    answer(tmp_path, NODE)
    record = slurm.read_node()
    slurm.write_node(NodeWrite(counts={"jgpu": 2500}, summary='{"a":1}'), record)
    given_words = (tmp_path / "given").read_text().splitlines()
    assert given_words == ["update", "nodename=n1", "gres=gpu:a100:2,jgpu:open:2500,jgpu:closed:1500", 'extra={"a":1}']


@given(st.integers(0, 10_000), st.integers(0, 4000))
def test_whatever_is_written_the_sum_of_the_types_stays(wanted: int, opened: int) -> None:
    said: list[str] = []

    class Listening(Slurm):
        def call(self, *words: str) -> str:
            said.extend(words)
            return ""

    record = NodeRecord(
        counts={"jgpu": opened}, in_use={}, most={"jgpu": 4000}, text=f"jgpu:open:{opened},jgpu:closed:{4000 - opened}"
    )
    Listening("n1").write_node(NodeWrite(counts={"jgpu": wanted}), record)
    assert sum(parse_gres(said[-1].removeprefix("gres=")).values()) == 4000


def test_a_job_is_told_from_the_other_tasks_of_its_array(slurm: Slurm, tmp_path: Path) -> None:
    answer(
        tmp_path,
        "4|1000|ada|RUNNING|gres:jgpu:open:250|3_1|cpu=1,mem=4G,node=1|1|\n3|1000|ada|RUNNING|gres:jgpu:open:500|3_2|cpu=1,mem=4G,node=1|1|\n",
    )
    job = slurm.job(3)
    assert job is not None
    assert (job.name, job.uid, job.user, dict(job.gres)) == ("3_2", 1000, "ada", {"jgpu:open": 500})
    given_words = (tmp_path / "given").read_text().splitlines()
    assert given_words == ["--local", "--noheader", "--states=all", "--jobs=3", COLUMNS]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("slurm_load_node error: Unable to contact slurm controller (connect failure)", EngineUnavailableError),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", EngineUnavailableError),
        ("slurm_update error: Invalid node name specified", EngineError),
    ],
)
def test_a_controller_that_is_down_is_told_from_a_refusal(
    slurm: Slurm, tmp_path: Path, wrong: str, kind: type[EngineError]
) -> None:
    answer(tmp_path, "", wrong, 1)
    with pytest.raises(EngineError) as raised:
        slurm.read_node()
    assert type(raised.value) is kind
    assert wrong.partition(":")[2].strip() in str(raised.value)


def test_a_command_that_hangs_or_is_missing_is_a_controller_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(EngineUnavailableError, match=r"did not answer within 0\.2 s"):
        Slurm("n1", timeout_s=0.2).read_node()
    with pytest.raises(EngineUnavailableError, match="cannot run the command"):
        Slurm("n1").call("no-such-command-of-slurm")


COLUMNS = "--Format=JobID:|,UserID:|,UserName:|,State:|,tres-per-node:|,JobArrayID:|,tres-alloc:|,NumNodes:|"
RUNNING = "12|1000|ada|RUNNING|gres:jgpu:open:250|12|cpu=1,mem=4G,node=1|1|\n"


def test_an_accounting_database_that_is_down_is_named(slurm: Slurm, tmp_path: Path) -> None:
    answer(tmp_path, "", "sacct: error: Sending PersistInit msg: Connection refused", 1)
    with pytest.raises(EngineUnavailableError, match="slurmdbd is not responding"):
        slurm.comment_in_accounting(12, "used")
    (tmp_path / "sacct").write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(EngineUnavailableError, match="slurmdbd or the network is down"):
        Slurm("n1", timeout_s=0.2).comment_in_accounting(12, "used")


@pytest.mark.parametrize("name", ["", "-o", "n1;id", "n1 n2", "a" * 70])
def test_a_nodes_name_is_no_option(name: str) -> None:
    with pytest.raises(EngineError, match="--node"):
        Slurm(name)


# -- shares --------------------------------------------------------------------------------------------------------------------


def job(**gres: int) -> SlurmJob:
    counts = {name.replace("_", ":"): count for name, count in gres.items()}
    return SlurmJob(job_id=5, name="5", uid=1000, user="ada", state="RUNNING", gres=counts)


POOLS = {"jgpu": "default", "jgpubig": "big"}


def test_the_share_that_a_job_asked_for() -> None:
    assert share_of_job(job(jgpu_open=250), POOLS) == ("default", 250)
    assert share_of_job(job(jgpubig_open=1000, gpu=1), POOLS) == ("big", 1000)
    assert share_of_job(job(gpu=1), POOLS) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"jgpu": 250}, "ask for --gres=jgpu:open:250"),
        ({"jgpu_closed": 250}, "ask for --gres=jgpu:open:250"),
        ({"jgpu_open": 1001}, "at most jgpu:open:1000"),
        ({"jgpu_open": 250, "jgpubig_open": 250}, "ask for one of them"),
    ],
)
def test_a_share_that_no_seat_can_have(asked: dict[str, int], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        share_of_job(job(**asked), POOLS)


def seat(**more: object) -> SeatStatus:
    plain = {
        "seat_id": "s",
        "owner": "ada",
        "server": "",
        "group": "",
        "pool": "default",
        "fraction_milli": 250,
        "memory_mib": 1,
        "device_id": None,
        "priority": 0,
        "weight": 1,
        "max_kernels": 1,
        "uid": 1000,
        "kernels": 0,
        "used_milli": 0,
        "confirmed": True,
        "age_ms": 0,
        "expires_ms": None,
    }
    return SeatStatus(**{**plain, **more})  # type: ignore[arg-type]


def test_whose_seat_it_is() -> None:
    assert job_of(seat(workload=Workload(engine="slurm", id="12"))) == 12
    assert job_of(seat(workload=Workload(engine="kubernetes", id="12"))) is None
    asked = JobSeat(job_id=7, uid=1000, user="ada", pool="default", fraction_milli=250, has_groups=False).request()
    assert asked.workload is None
    assert job_of(seat(server=asked.server, admitted=True)) == 7
    assert (
        job_of(seat(server=asked.server, admitted=False, hub="http://hub")) is None
    )  # a server with that user-given name
    assert job_of(seat(server=asked.server, admitted=True, hub="http://hub")) is None
