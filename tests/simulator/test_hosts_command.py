"""`jupyter gpu simulate` on several hosts, its progress, and the page of a run."""

import json
import re
import shlex
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from fractional_gpu import __version__
from fractional_gpu.commands.main import main
from fractional_gpu.commands.simulation.scenario import Scenario
from fractional_gpu.commands.terminal.progress import Progress

MANY_SWAPS = ("--set", "pace=short", "--set", "memory_of=cell", "--set", "several_gpus=0")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["simulate", "--json", *arguments]) == 0
    figures: dict[str, object] = json.loads(capsys.readouterr().out)
    return {**figures, "wall_s": 0}


def test_baselines_and_the_search_for_hosts_work_on_random_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--users", "8", "--set", "door=random", "--set", "several_gpus=0")
    baselines = ("--baseline", "whole-gpu-suspend", "--baseline", "static-fraction")
    both = simulated(capsys, *arguments, "--hosts", "3x(2x80GiB)", *baselines)
    shown = both["baselines"]
    assert isinstance(shown, dict)
    assert {name: (one["hosts"], one["lost"]) for name, one in shown.items()} == {
        "whole-gpu-suspend": (3, 0),
        "static-fraction": (3, 0),
    }
    found = simulated(capsys, *arguments, "--hosts", "?x(1x80GiB)", "--find-devices", "--p95-wait", "1s")
    hosts, waits = found["hosts"], found["wait_s"]
    assert isinstance(hosts, int)
    assert isinstance(waits, dict)
    assert hosts > 1
    assert waits["p95"] <= 1
    fewer = simulated(capsys, *arguments, "--hosts", f"{hosts - 1}x(1x80GiB)")["wait_s"]
    assert isinstance(fewer, dict)
    assert fewer["p95"] > 1


def test_a_session_that_no_host_can_serve_is_named_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--users", "20", "--hosts", "2x(2x80GiB)", "--set", "door=random"]) == 1
    assert "for synthetic users, with --set several_gpus=0" in capsys.readouterr().err


def test_the_help_has_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    said = capsys.readouterr().out
    assert not [name for name in Scenario.__struct_fields__ if f"\n  {name} " not in said]
    assert re.search(r"\n  swap_fixed +fixed time per swap \(300ms\)\n", said)


# -- how far it is -----------------------------------------------------------------------------------------------------------


def test_all_that_may_take_long_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--baseline", "static-fraction", "--baseline", "whole-gpu-suspend", "--baseline", "reservation")
    last: dict[str, str] = {}
    counter = Progress.counter

    def recorded(progress: Progress, things: str) -> Callable[[int, int], None]:
        count = counter(progress, things)

        def record(done: int, of: int) -> None:
            count(done, of)
            last[progress.what] = progress._counted()

        return record

    monkeypatch.setattr(Progress, "counter", recorded)
    machine = ("--hosts", "2x(2x80GiB)", "--set", "several_gpus=0")
    assert main(["simulate", "--users", "3", "--json", *machine, *arguments]) == 0
    said = "\n".join(f"{what}: {counted}" for what, counted in last.items())
    ways = ["", *(f"{name}, " for name in arguments[1::2])]
    assert all(re.search(rf"(?m)^{way}4 devices: 6 of 6 sessions after \d+ s$", said) for way in ways)
    assert re.search(r"(?m)^synthetic users: 3 of 3 user-days generated after \d+ s$", said)


@pytest.mark.parametrize(
    ("machine", "noted"), [("--devices=20x80GiB", True), ("--hosts=2x(20x80GiB)", True), ("--devices=16x80GiB", False)]
)
def test_a_host_with_more_gpus_than_any_real_one_is_pointed_out(
    machine: str, *, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--users", "1", "--json", machine, "--set", "several_gpus=0"]) == 0
    assert ("note: 20 devices are in one host, more than any real host has" in capsys.readouterr().err) == noted


# -- the page ------------------------------------------------------------------------------------------------------------------


def page_of(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> str:
    picture = tmp_path / "run.html"
    simulated(capsys, *arguments, "--picture", str(picture))
    return picture.read_text(encoding="utf-8")


def test_the_page_has_every_option_that_made_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "pool's <config>.py"
    policy.write_text('c.GPUBroker.pools = {"default": {"fractions": ["1/8", "1"]}}  # 1 < 2\n')
    arguments = ("--users", "4", "--hosts", "2x(2x80GiB)", "--set", "door=most-free", "--seed", "7")
    page = page_of(
        capsys, tmp_path, *arguments, "--set", "slowdown=false", "--set", "several_gpus=0", "--policy", str(policy)
    )
    command = unescape(page.split("<pre>")[1].split("</pre>")[0])
    for word in ("users=4", "hosts=2x(2x80GiB)", "door=most-free", "seed=7", "days=1", "swap_fixed=300ms"):
        assert word in shlex.split(command)
    assert "slowdown=false" in shlex.split(command)
    assert not [word for word in ("json", "picture", "weekends", "None") if word in command]
    assert f"jupyter-fractional-gpu {__version__}" in page
    assert "# 1 &lt; 2" in page
    assert "<config>" not in page


def test_the_command_on_the_page_makes_the_same_page_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = page_of(capsys, tmp_path, "--users", "3", "--baseline", "reservation", "--baseline", "cull", *MANY_SWAPS)
    words = shlex.split(unescape(first.split("<pre>")[1].split("</pre>")[0]))
    assert words[:3] == ["jupyter", "gpu", "simulate"]
    assert page_of(capsys, tmp_path, *words[3:]) == first
