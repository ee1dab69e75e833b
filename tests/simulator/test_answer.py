"""The sentence with which `jupyter gpu simulate` begins, and how many hosts suffice."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from fractional_gpu.commands.main import main
from fractional_gpu.commands.simulation.answer import Answer
from fractional_gpu.simulator.experience import Goal, UserExperience
from fractional_gpu.simulator.result import Result
from tests.site.blocks import blocks, commands
from tests.support.paths import ROOT

USERS = ("simulate", "--users", "12", "--set", "several_gpus=0", "--p95-wait", "1s")
SEARCH = (*USERS, "--find-devices", "--set", "seeds=3")


def answer(count: int, *by_seed: int, saved_mib: int = 0, name: str = "fractional", **given: object) -> Answer:
    result = Result(
        name=name, experience=UserExperience([]), sessions=0, cells=0, gpu_cells=0, devices=4 * count, hosts=count
    )
    result.host_peak_mib = saved_mib
    terms = {"counted": "hosts", "goal": Goal(p95_wait_ms=3_000), **given}
    return Answer(results=[result, replace(result, host_peak_mib=0)], by_seed=list(by_seed), **terms)  # type: ignore[arg-type]


LATE = Goal(p95_wait_ms=3_000, p99_wait_ms=30_000, p95_late_ms=180_000)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (answer(9, 8, 9, 8, of=12), "9 of 12 hosts suffice (8 to 9 over 3 seeds) for p95 waits within 3 s."),
        (answer(9, 9, 9, of=12), "9 of 12 hosts suffice (the same over 2 seeds) for p95 waits within 3 s."),
        (answer(9, 8, 8, of=12), "9 of 12 hosts suffice (8 to 9 over 2 seeds) for p95 waits within 3 s."),
        (answer(1, 1, of=1), "1 of 1 host suffices for p95 waits within 3 s."),
        (answer(5, 20, counted="devices"), "20 devices suffice for p95 waits within 3 s."),
        (
            answer(9, 9, saved_mib=1536),
            "9 hosts suffice for p95 waits within 3 s, with up to 1.5 GiB saved on a host.",
        ),
        (
            answer(9, 9, goal=LATE),
            "9 hosts suffice for p95 waits within 3 s and p99 waits within 30 s and a p95 lateness within 3 min for 95 % of the users.",
        ),
    ],
)
def test_a_search_is_answered_with_one_sentence(found: Answer, sentence: str) -> None:
    assert found.sentence() == sentence
    compared = found.sentence([answer(21, 21, name="static-fraction")])
    assert compared == f"{sentence.removesuffix('.')}; static-fraction needs 21."


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    return {**json.loads(capsys.readouterr().out), "wall_s": 0}


@pytest.mark.parametrize("door", ["fit", "slurm-count", "slurm-shards"])
def test_a_search_says_how_many_of_the_hosts_suffice(door: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*SEARCH, "--hosts", "9x(1x80GiB)", "--set", f"door={door}")
    found = figures(capsys, *asked)
    assert found == figures(capsys, *asked), "the same seeds give the same result"
    shown = found["answer"]
    assert isinstance(shown, dict)
    assert list(shown) == ["sentence", "suffice", "of", "counted", "by_seed", "goal"]
    assert (shown["suffice"], shown["of"], shown["counted"]) == (found["hosts"], 9, "hosts")
    assert len(shown["by_seed"]) == 3
    assert shown["goal"] == {"p95_wait_s": 1}
    assert re.match(
        rf"{found['hosts']} of 9 hosts suffice \(.* over 3 seeds\) for p95 waits within 1 s", shown["sentence"]
    )
    assert main(list(asked)) == 0
    assert capsys.readouterr().out.splitlines()[0] == shown["sentence"]
    for seed in ("1", "2", "3"):
        one = figures(
            capsys, *USERS[:5], "--seed", seed, "--hosts", f"{found['hosts']}x(1x80GiB)", "--set", f"door={door}"
        )
        for waits in (one["wait_s"], one["door_wait_s"]):
            assert isinstance(waits, dict)
            assert waits["p95"] <= 1


def test_hosts_that_are_too_few_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEARCH, "--hosts", "1x(1x80GiB)"]) == 1
    assert "with 1 hosts more than 5 % of the GPU cells' waits are longer than 1 s" in capsys.readouterr().err


def test_hosts_of_several_kinds_are_turned_off_from_the_last_and_a_baseline_may_need_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hosts = ("--hosts", "3x(2x80GiB),1x(1x80GiB)", "--baseline", "static-fraction")
    found = figures(capsys, *SEARCH, *hosts)
    assert (found["hosts"], found["devices"]) == (2, 4)
    baselines, shown = found["baselines"], found["answer"]
    assert isinstance(baselines, dict)
    assert isinstance(shown, dict)
    assert shown["sentence"].endswith(f"; static-fraction needs {baselines['static-fraction']['hosts']}.")


def test_without_a_search_the_sentence_is_about_the_waits(capsys: pytest.CaptureFixture[str]) -> None:
    shown = figures(capsys, *USERS[:5], "--hosts", "1x(2x80GiB)", "--set", "door=slurm-shards")["answer"]
    assert isinstance(shown, dict)
    assert list(shown) == ["sentence"]
    assert re.match(
        r"12 users on 2 devices of 80 GiB: no GPU cell waited; [\d.]+ % of the sessions waited to begin, and 5 % waited at least [\d.]+ "
        r"h; ",
        shown["sentence"],
    )


PLANNING = [
    line for block in blocks(ROOT / "docs" / "planning.md") if block.language == "bash" for line in commands(block.text)
]
CHANGES = re.findall(r"^\|[^|]*\| `(--[^|]*)` \|", (ROOT / "docs" / "planning.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("changes", ["", *CHANGES])
def test_the_command_of_the_document_answers_for_fewer_users(changes: str, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = PLANNING
    words = [*shlex.split(command.replace("--users 300", "--users 6"))[2:], *shlex.split(changes)]
    assert main(words) == 0
    of = "" if "?x(" in changes else "of 12 hosts "
    assert re.match(rf"\d+ {of or 'hosts? '}suffices? \(.* over 3 seeds\) for p95 waits", capsys.readouterr().out)
