"""How findings are shown, and what they mean for the exit code."""

import json

from fractional_gpu.commands.doctor.report import Finding, as_json, exit_code, note, ok, problem, render, warning

GOOD = ok("versions", "all new")
ODD = note("driver", "no GPU")
BAD = warning("mps", "MPS runs", "stop it")
WORST = problem("ledger", "damaged", "put a backup in its place")


def test_only_errors_fail() -> None:
    assert exit_code([]) == exit_code([GOOD, ODD, BAD]) == 0
    assert exit_code([GOOD, WORST, ODD]) == 1


def test_each_finding_is_a_line_with_what_to_do_below_it() -> None:
    assert render([GOOD, BAD]).splitlines() == [
        "ok       versions        all new",
        "warning  mps             MPS runs",
        "                         -> stop it",
        "",
        "No errors, 1 warning.",
    ]


def test_the_conclusion_counts() -> None:
    assert render([GOOD, ODD]).endswith("\n\nNothing to complain of.\n")
    assert render([WORST]).endswith("\n\n1 error, no warnings.\n")
    assert render([WORST, WORST, BAD]).endswith("\n\n2 errors, 1 warning.\n")


def test_long_findings_stay_within_the_screen_and_are_whole() -> None:
    words = [f"word{number}" for number in range(60)]
    shown = render([warning("driver", " ".join(words), " ".join(words))])
    assert max(map(len, shown.splitlines())) <= 118
    assert [word for word in shown.split() if word.startswith("word")] == words * 2


def test_json_has_everything_and_the_worst_severity() -> None:
    found: list[Finding] = [GOOD, WORST, BAD]
    content = json.loads(as_json(found))
    assert (content["ok"], content["worst"]) == (False, "error")
    assert content["findings"][1] == {
        "check": "ledger",
        "severity": "error",
        "finding": "damaged",
        "advice": "put a backup in its place",
    }
    assert json.loads(as_json([ODD, BAD])) | {"findings": []} == {"ok": True, "worst": "warning", "findings": []}
    assert json.loads(as_json([]))["worst"] == "ok"
