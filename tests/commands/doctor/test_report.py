"""How findings are shown, and what they mean for the exit code."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.commands.doctor.doctor import next_step
from fractional_gpu.commands.doctor.report import Finding, as_json, exit_code, note, ok, problem, render, warning
from fractional_gpu.commands.terminal.text import plain
from fractional_gpu.jupyter.kernelspecs import InstalledSpec

GOOD = ok("versions", "all new")
ODD = note("driver", "no GPU")
BAD = warning("mps", "MPS runs", "stop it")
WORST = problem("ledger", "damaged", "restore a backup")


def test_only_errors_fail() -> None:
    assert exit_code([]) == exit_code([GOOD, ODD, BAD]) == 0
    assert exit_code([GOOD, WORST, ODD]) == 1


def test_each_finding_is_a_line_with_what_to_do_below_it() -> None:
    assert plain(render([GOOD, BAD])).splitlines() == [
        "ok       versions        all new",
        "warning  mps             MPS runs",
        "                         -> stop it",
        "",
        "No errors, 1 warning.",
    ]


SIMULATED, REAL = (
    InstalledSpec(
        name="x",
        display_name=name,
        folder=Path("/x"),
        pool="default",
        fraction_milli=250,
        gated=True,
        simulated=simulated,
    )
    for name, simulated in (("1/4 simulated", True), ("1/4 real", False))
)
HAS_GPU, NO_GPU = ok("driver", "580"), warning("driver", "no GPU was found: no driver", "install one")


@pytest.mark.parametrize(
    ("findings", "specs", "step"),
    [
        ([NO_GPU, WORST], [SIMULATED], "fix the error found by the check `ledger`: restore a backup"),
        ([NO_GPU], [], "`jupyter gpu demo`"),
        ([NO_GPU], [REAL], "`jupyter gpu demo`"),
        ([NO_GPU], [REAL, SIMULATED], "choose the kernel '1/4 simulated'"),
        ([HAS_GPU, BAD], [], "`jupyter gpu kernels install`"),
        ([HAS_GPU], [REAL], "choose the kernel '1/4 real'"),
        ([HAS_GPU], [replace(REAL, launcher=True)], "start VS Code"),
        ([HAS_GPU], [replace(REAL, shadowed_by=Path("/y"))], "`jupyter gpu kernels install`"),
    ],
)
def test_the_next_step_is_one_that_can_be_made(findings: list[Finding], specs: list[InstalledSpec], step: str) -> None:
    assert step in next_step(findings, specs)


def test_long_findings_stay_within_the_screen_and_are_whole() -> None:
    words = [f"word{number}" for number in range(60)]
    findings = [warning("driver", " ".join(words), " ".join(words))]
    for width, most in ((60, 60), (100, 100), (300, 118)):
        shown = plain(render(findings, "x" + " do it" * 60, width))
        assert max(map(len, shown.splitlines())) <= most
        assert [word for word in shown.split() if word.startswith("word")] == words * 2


def test_json_has_everything_and_the_worst_severity() -> None:
    found: list[Finding] = [GOOD, WORST, BAD]
    content = json.loads(as_json(found))
    assert (content["ok"], content["worst"]) == (False, "error")
    assert content["findings"][1] == {
        "check": "ledger",
        "severity": "error",
        "finding": "damaged",
        "advice": "restore a backup",
    }
    left = {"ok": True, "worst": "warning", "findings": [], "next": "stop it"}
    assert json.loads(as_json([ODD, BAD], "stop it")) | {"findings": []} == left
    assert json.loads(as_json([]))["worst"] == "ok"
