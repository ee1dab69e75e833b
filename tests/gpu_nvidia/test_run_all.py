"""Promises of the one command for a machine with a GPU (tests/gpu/run_all.py), with small steps in the place of the real ones."""

import json
from pathlib import Path

import pytest

from tests.gpu import run_all
from tests.gpu.run_all import ROOT, STEPS, Step, main

WRITES = """
import json, os, pathlib
assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == os.getcwd()
tests = {"test_one": {"saw": {}, "outcome": "passed"}, "test_two": {"saw": {}, "outcome": "failed"}}
found = {"devices": [{"name": "NVIDIA H200"}], "driver": "580.1", "torch": "2.11", "tests": tests}
pathlib.Path(os.environ["JUPYTER_GPU_RESULTS"]).write_text(json.dumps(found))
"""
HANGS = "import sys, time; print('begun', flush=True); time.sleep(600)"


def small(monkeypatch: pytest.MonkeyPatch, **codes: str) -> None:
    steps = {name: Step(arguments=("-c", code), simulated=(), longest_s=60) for name, code in codes.items()}
    monkeypatch.setattr(run_all, "STEPS", steps)


def test_each_step_has_its_line_and_what_it_saw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch, doctor="print('all is well')", tests=WRITES)
    assert main([str(tmp_path / "results")]) == 0
    summary = (tmp_path / "results" / "summary.txt").read_text()
    doctor, tests, *seen = summary.splitlines()
    assert doctor.startswith("ok doctor, ")
    assert tests.startswith("ok tests, ")
    assert seen == ["  NVIDIA H200, driver 580.1, torch 2.11: 1 of 2 passed", "  test_two: failed"]
    assert capsys.readouterr().out.endswith(summary)


def test_a_step_that_fails_is_told_with_its_last_word_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tests.json").write_text('{"tests": {"test_old": {"saw": {}, "outcome": "passed"}}}')
    small(monkeypatch, tests="raise SystemExit('no GPU was found')", doctor="print('all is well')")
    assert main([str(tmp_path)]) == 1
    first, second = (tmp_path / "summary.txt").read_text().splitlines()
    assert first.startswith("failed (status 1) tests, ")
    assert first.endswith(": no GPU was found")
    assert second.startswith("ok doctor")


def test_a_step_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small(monkeypatch, tests=HANGS)
    assert main([str(tmp_path), "--longest", "2"]) == 1
    assert (tmp_path / "summary.txt").read_text().startswith("not done within 2 s tests, ")


def test_sizes_and_their_reasons_are_shown(tmp_path: Path) -> None:
    row = {"shrinking": True, "suspend_s": 4.25, "suspend_gb_per_s": 2.0, "resume_s": 1.5, "resume_gb_per_s": 5.7}
    rows = [{"held_mib": 8192, **row}, {"held_mib": 65536, "not_measured": "no room"}]
    copies = {"to_device": 50.1, "to_host": 52.2}
    found = {"phases": {"pinned_copies_gb_per_s": copies, "sizes": rows}}
    (tmp_path / "phases.json").write_text(json.dumps(found))
    assert run_all._SEEN["phases"](tmp_path) == [
        "  pinned copies: to_device 50.1 GB/s, to_host 52.2 GB/s",
        "    8192 MiB, shrinking on : suspend 4.25 s (2.0 GB/s), resume 1.50 s (5.7 GB/s)",
        "   65536 MiB: not measured, no room",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--wheels", "/nowhere"], "there is no wheel in /nowhere"), (["--longest", "0"], "from 1, got 0")],
)
def test_arguments_that_are_not_understood_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_steps_commands_are_there() -> None:
    for step in STEPS.values():
        scripts = [one for one in step.arguments if one.startswith("tests/")]
        assert all((ROOT / script).exists() for script in scripts)
