"""How the Slurm spawner translates texts to and from Slurm's commands. Without Slurm."""

import json
import shlex
import subprocess
import tomllib
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyterhub.apihandlers import default_handlers
from tornado import web
from traitlets.config import Config

from fractional_gpu.engines.engine import EngineError, EngineUnavailableError
from fractional_gpu.engines.slurm import failed
from fractional_gpu.protocol.nodes import NodeSummary, PoolSummary, encode_summary
from fractional_gpu_hub.engines import Allocation
from fractional_gpu_hub.engines.offers import NO_AGENT
from fractional_gpu_hub.engines.slurm import FractionalGPUSlurmSpawner, _PortHandler
from fractional_gpu_hub.engines.slurm_cluster import cluster_of
from fractional_gpu_hub.engines.slurm_commands import (
    JobState,
    SlurmNode,
    ended_sentence,
    job_id_of,
    parse_job,
    parse_nodes,
    waiting_sentence,
)
from tests.support.paths import ROOT

pytestmark = pytest.mark.promise("slurm-hub")

QUARTER = Allocation(pool="default", fraction_milli=250, memory_mib=1000, host_memory_mib=3000)
NOW = datetime(2026, 11, 24, 18, 0)  # noqa: DTZ001 - as Slurm prints it


def made(name: str = "ada", server: str = "", **traits: Any) -> Any:  # noqa: ANN401 - an untyped spawner
    user = SimpleNamespace(name=name, groups=[], id=7, url="/user/x/", escaped_name=name, spawners={})
    spawner: Any = FractionalGPUSlurmSpawner(user=user, hub=SimpleNamespace(api_url="http://hub"), **traits)
    spawner.orm_spawner = SimpleNamespace(state=None, user_options=None, name=server, server=None)
    spawner.set_trait("req_homedir", "/home/ada")
    spawner._gpu_allocation = QUARTER
    return spawner


# ruff: noqa: S106 -- no passwords

# -- to Slurm ----------------------------------------------------------------------------------------------------------------


def test_the_request_of_a_share() -> None:
    assert made().gpu_request(QUARTER) == ["--gres=jgpu:open:250", "--mem=3000M"]
    assert made(gpu_partitions={"default": "gpu"}).gpu_request(QUARTER)[-1] == "--partition=gpu"
    assert made(gpu_gres="shard", gpu_shards_per_device=10).gpu_request(QUARTER)[0] == "--gres=shard:3", "rounded up"
    assert made(req_partition="cpu").gpu_request(None) == ["--mem=2048M", "--partition=cpu"]


def test_the_command_has_one_word_for_each_text_and_ours_stand_last() -> None:
    spawner = made(
        exec_prefix="sudo -E -u {username}",
        req_options="--gres=jgpu:1000 --comment='two words'",
        req_account="lab",
        req_runtime="8:00",
    )
    words = [*spawner._gpu_prefix(), *spawner.gpu_sbatch({"A": "1", "B;id": "2"})]
    assert words[:5] == ["sudo", "-E", "-u", "ada", "sbatch"]
    assert "--export=A" in words, "what is no name of a variable goes nowhere"
    assert {"--account=lab", "--time=8:00", "--no-requeue", "--chdir=/home/ada", "--comment=two words"} <= set(words)
    assert words[-2:] == ["--gres=jgpu:open:250", "--mem=3000M"]


@pytest.mark.parametrize("name", ["-x", "a b", "$(id)", "a;id", "a\nb", "", "x" * 65, "é"])
def test_a_name_that_no_user_of_the_machine_has_is_refused_before_any_command(name: str) -> None:
    spawner = made(name)
    with pytest.raises(web.HTTPError, match=r"is not valid on the cluster|user-name"):
        spawner._gpu_prefix()
    with pytest.raises(web.HTTPError):
        spawner.gpu_script()


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=4))
def test_the_servers_words_arrive_as_they_are_whatever_they_hold(words: list[str]) -> None:
    spawner = made(gpu_filter_kernels=False)
    spawner.batchspawner_singleuser_cmd, spawner.cmd = "printf '%s\\0'", words
    spawner.get_args = list
    assert shlex.split(spawner.cmd_formatted_for_batch())[2:] == words


def test_the_script_runs_what_it_is_given_and_no_more() -> None:
    spawner = made(req_srun="", req_prologue="echo before", req_epilogue="echo after", gpu_path="/usr/bin:/bin:/a b")
    spawner.get_args = list
    spawner.batchspawner_singleuser_cmd, spawner.cmd = (
        "printf '%s|'",
        ["$(echo no)", "`echo no`", "; echo no", "'", "{{cmd}}"],
    )
    text = spawner.gpu_script()
    done = subprocess.run(["bash"], input=text + "echo $PATH", capture_output=True, text=True, check=False)
    assert done.stdout == "before\n$(echo no)|`echo no`|; echo no|'|{{cmd}}|after\n"
    spawner.user_options = {"cmd": "evil", "prologue": "evil", "memory": "1"}
    assert spawner.gpu_script() == text, "user options are no part of it"


def test_two_servers_of_a_user_and_two_users_have_jobs_of_different_names() -> None:
    names = {made("ada").gpu_job_name, made("bob").gpu_job_name, made("ada", "second").gpu_job_name}
    assert len(names) == 3
    assert made("ada").gpu_job_name in names


@pytest.mark.parametrize(
    "traits", [{"gpu_gres": "a b"}, {"gpu_gres": "jgpu:1:2"}, {"gpu_shards_per_device": 0}, {"gpu_base_memory": "x"}]
)
def test_settings_that_cannot_be_are_refused(traits: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="gpu_"):
        made(**traits)


# -- from Slurm --------------------------------------------------------------------------------------------------------------

LINE = (
    "NodeName=n1 Arch=x86_64 Gres=jgpu:1000 NodeAddr=10.0.0.1 NodeHostName=vm Port=1 OS=Linux 6.1 #1 SMP  State={state} "
    "Partitions=gpu,all  Comment=a text  Reason=was Extra={{}} [root@2026-11-24T19:00:21] Extra={extra}"
)
SUMMARY = encode_summary(
    NodeSummary(
        at_s=1,
        pools=[
            PoolSummary(
                name="default",
                devices=1,
                total_milli=1000,
                held_milli=0,
                admissible_milli=500,
                count="jgpu",
                device_mib=8,
            )
        ],
    )
)


def node(state: str = "IDLE", extra: str = SUMMARY) -> SlurmNode:
    (found,) = parse_nodes(LINE.format(state=state, extra=extra))
    return found


def test_a_node_has_its_summary_its_address_and_its_partitions() -> None:
    found = node()
    assert (found.name, found.address, found.partitions) == ("n1", "10.0.0.1", frozenset({"gpu", "all"}))
    (pool,) = found.pools
    assert (pool.admissible_milli, pool.device_mib, pool.fractions_milli, pool.why_not) == (
        500,
        8,
        [],
        "",
    )


@pytest.mark.parametrize(
    ("state", "why_not"),
    [
        ("IDLE", ""), ("MIXED", ""), ("ALLOCATED", ""), ("IDLE+CLOUD", ""), ("IDLE+POWERED_DOWN", ""), ("IDLE+DRAIN", "drained"),
        ("MIXED+DRAIN", "drained"), ("DOWN", "down"), ("IDLE*", "not answering"), ("DOWN+NOT_RESPONDING", "down"),
        ("IDLE+MAINTENANCE", "maintenance"), ("INVAL", "inval"),
    ],
)  # fmt: skip
def test_the_states_of_nodes(state: str, why_not: str) -> None:
    found = node(state)
    assert (found.state, found.pools[0].why_not) == (why_not or "in service", why_not)


@pytest.mark.parametrize("extra", ["another_programs_text", '{"version":99}', '{"version":1', "{" + "x" * 5000])
def test_a_text_that_is_no_summary_is_none_and_a_broken_one_says_why(extra: str) -> None:
    found = node(extra=extra)
    assert found.pools == []
    assert (found.problem == NO_AGENT) == (not extra.startswith("{"))


def test_a_job_in_the_queue_says_why_and_until_when() -> None:
    job = parse_job("12|PENDING|n/a|2026-11-24T18:30:00|Resources\n", "12")
    assert job is not None
    assert waiting_sentence(job, NOW) == (
        "Job 12 is waiting in Slurm's queue: no node has enough free resources (Resources). Slurm expects to start it at 18:30."
    )
    job = parse_job("12|PENDING|n/a|N/A|QOSMaxGRESPerUser", "12")
    assert job is not None
    assert waiting_sentence(job, NOW) == "Job 12 is waiting in Slurm's queue (QOSMaxGRESPerUser)."
    assert parse_job("13|RUNNING|n1|N/A|None", "12") is None
    with pytest.raises(EngineUnavailableError):
        parse_job("12|RUNNING", "12")


def test_why_a_job_ended() -> None:
    assert "more host memory" in ended_sentence(JobState(job_id="1", state="OUT_OF_MEMORY"), "1")
    assert "it ended (failed)" in ended_sentence(JobState(job_id="1", state="FAILED"), "1")
    assert "is gone" in ended_sentence(None, "1")


@pytest.mark.parametrize("text", ["", "sbatch: error", "0", "12x", "-1", "1;2;3\nno"])
def test_what_is_no_number_of_a_job_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="instead of a job id"):
        job_id_of(text)
    assert job_id_of("a warning\n12;cluster\n") == "12"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("slurm_load_jobs error: Invalid job id specified", EngineError),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", EngineError),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", EngineUnavailableError),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", EngineUnavailableError),
        ("error: Munge encode failed: Invalid authentication credential", EngineUnavailableError),
        ("sudo: a password is required", EngineUnavailableError),
        ("", EngineUnavailableError),
    ],
)
def test_only_slurms_own_refusal_is_a_refusal(said: str, kind: type[Exception]) -> None:
    assert type(failed("squeue", said, 1)) is kind


def test_servers_are_known_by_their_jobs_names_which_stand_last() -> None:
    lines = [
        "f00|7|RUNNING|n1|gres:jgpu:250|1:02|ada|jupyter-0a",
        "f00|8|RUNNING|n1|N/A|1:02|bob|jupyter-x|RUNNING|n2|y|z|ada|jupyter-1",
        "5|RUNNING|n2|N/A|1:02|ada|jupyter-2: another line of the name of bob's job",
        "f00|9|PENDING||N/A|0:00|bob|train",
        "broken",
    ]
    text = "\n".join(lines)
    found = cluster_of([node()], text, "f00|").servers
    assert [(one.user, one.node, one.milli) for one in found] == [("ada", "n1", 250), ("bob", "n1", None)]


# -- the port ----------------------------------------------------------------------------------------------------------------


class _Posted(_PortHandler):
    """The handler without a hub."""

    def __init__(self, body: object, token: str, spawners: dict[str, Any]) -> None:
        self.body, self.token, self._user = body, token, SimpleNamespace(spawners=spawners)
        self.sent: list[str] = []

    @property
    def current_user(self) -> Any:  # noqa: ANN401
        return self._user

    def get_auth_token(self) -> str:
        return self.token

    def get_json_body(self) -> object:
        return self.body

    def set_status(self, code: int) -> None:
        self.code = code

    def finish(self, text: str) -> None:
        self.sent.append(text)


@pytest.mark.parametrize(
    ("body", "token"),
    [
        ({"port": 80, "batch_cancel_cmd": "id"}, "t"),
        ({"batch_cancel_cmd": "id"}, "t"),
        ({"port": "80"}, "t"),
        ({"port": True}, "t"),
        ({"port": 0}, "t"),
        ({"port": 65536}, "t"),
        ([], "t"),
        (None, "t"),
        ({"port": 80}, "another"),
        ({"port": 80}, ""),
    ],
)
def test_a_servers_token_sets_nothing_but_its_servers_port(body: object, token: str) -> None:
    spawner = SimpleNamespace(api_token="t", port=1, batch_cancel_cmd="scancel")
    with pytest.raises(web.HTTPError):
        _Posted(body, token, {"": spawner}).post()
    assert (spawner.port, spawner.batch_cancel_cmd) == (1, "scancel")


def test_the_port_is_set_and_the_hub_has_this_route_only() -> None:
    spawner, other = SimpleNamespace(api_token="t", port=1), SimpleNamespace(api_token="u", port=1)
    posted = _Posted({"port": 8888}, "t", {"a": other, "b": spawner})
    posted.post()
    assert (spawner.port, other.port, posted.code) == (8888, 1, 201)
    assert json.loads(posted.sent[0])
    assert [handler for route, handler in default_handlers if "batchspawner" in route] == [_PortHandler]


# -- the example -------------------------------------------------------------------------------------------------------------


def test_the_examples_configuration_is_one_of_this_spawner() -> None:
    text = (ROOT / "examples" / "slurm" / "jupyterhub_config.py").read_text()
    c = Config()
    exec(compile(text, "jupyterhub_config.py", "exec"), {"get_config": lambda: c})  # noqa: S102 - as the hub does
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["jupyterhub.spawners"][c.JupyterHub.spawner_class]
    assert named == f"{FractionalGPUSlurmSpawner.__module__}:{FractionalGPUSlurmSpawner.__name__}"
    for kind in set(c) - {"JupyterHub"}:
        (there,) = [one for one in FractionalGPUSlurmSpawner.__mro__ if one.__name__ == kind]
        assert set(c[kind]) <= set(there.class_trait_names(config=True)), f"{kind}: names of settings"
    spawner = made(config=c)
    assert spawner.start_timeout == 960
    assert spawner.gpu_request(QUARTER)[-1] == "--partition=gpu"
    assert spawner._gpu_prefix() == ["sudo", "-E", "-u", "ada"]
    (page,) = c.JupyterHub.services.get_value([])
    assert page["command"][-2:] == ["--cluster", "slurm"]
