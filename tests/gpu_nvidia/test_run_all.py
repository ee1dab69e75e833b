"""Promises of the one command for a machine with a GPU (tests/gpu/run_all.py), with small steps instead of the real ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import figures, run_all
from tests.gpu.run_all import Step, main
from tests.gpu.talk import gone
from tests.support.paths import ROOT

WRITES = """
import json, os, pathlib
assert os.environ["PYTHONPATH"].startswith(os.getcwd())
tests = {"test_one": {"saw": {"suspend": "refused: no"}, "outcome": "passed"}, "test_two": {"saw": {}, "outcome": "failed"}}
pathlib.Path(os.environ["JUPYTER_GPU_RESULTS"]).write_text(json.dumps({"tests": tests}))
"""
HANGS = "import sys, time; print('begun', flush=True); time.sleep(600)"
# In a separate group, as an item is, and ignoring SIGTERM.
STUBBORN = """
import os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], process_group=0)
pathlib.Path(os.environ["JUPYTER_GPU_RESULTS"]).write_text('{"items": {"child": {"pid": %d}}}' % child.pid)
signal.pause()
"""
MACHINE = {"simulated": False, "double": False, "at": "2026-11-20T10:00:00Z", "kernel": "6.18", "driver": "580.159.04"}
H100 = {**MACHINE, "devices": [{"name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559}], "torch": "2.11.0"}


def small(monkeypatch: pytest.MonkeyPatch, **codes: str) -> None:
    steps = {name: Step(arguments=("-c", code), longest_s=60, part=1) for name, code in codes.items()}
    monkeypatch.setattr(run_all, "STEPS", steps)
    monkeypatch.setattr(run_all, "_machine", lambda _environment: H100)


def summary(folder: Path) -> list[str]:
    return (folder / "summary.txt").read_text().splitlines()


def test_each_step_has_its_line_and_what_it_saw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch, questions="print('all is well')", tests=WRITES)
    folder = tmp_path / "results"
    assert main([str(folder)]) == 0
    *seen, machine, questions, tests = summary(folder)
    assert machine == "NVIDIA H100 80GB HBM3, driver 580.159.04, Linux 6.18, torch 2.11.0, 2026-11-20"
    assert questions.startswith("ok questions, ")
    assert tests.startswith("ok tests, ")
    assert seen == [
        "| tests |  |  |",
        "| --- | --- | --- |",
        '| test_one | passed | {"suspend": "refused: no"} |',
        "| test_two | failed | {} |",
        "",
    ]
    assert capsys.readouterr().out.endswith("\n".join(summary(folder)) + "\n")
    found = json.loads((folder / "results.json").read_text())
    assert found["machine"] == H100
    assert found["tests"]["tests"]["test_two"]["outcome"] == "failed"
    assert set(found["steps"]) == {"questions", "tests"}
    assert sorted(path.name for path in folder.iterdir()) == [
        "questions.log",
        "results.json",
        "summary.txt",
        "tests.log",
    ]


def test_a_step_that_fails_is_told_with_its_last_word_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tests.json").write_text('{"tests": {"test_old": {"saw": {}, "outcome": "passed"}}}')
    small(monkeypatch, tests="raise SystemExit('no GPU was found')", questions="print('all is well')")
    assert main([str(tmp_path)]) == 1
    *_, first, second = summary(tmp_path)
    assert first.startswith("failed (status 1) tests, ")
    assert first.endswith(": no GPU was found")
    assert second.startswith("ok questions")


def test_a_step_that_does_not_end_is_ended_with_all_that_it_started_and_keeps_its_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(monkeypatch, tests=HANGS, questions=STUBBORN, measures="print('reached')")
    monkeypatch.setattr(run_all, "_KILL_S", 0.5)
    assert main([str(tmp_path), "--longest", "2"]) == 1
    *seen, _, _, tests, questions, measures = summary(tmp_path)
    assert tests.startswith("not done within 2 s tests, ")
    assert questions.startswith("not done within 2 s questions, ")
    assert seen[-1] == "| what it saw is in results.json (KeyError: 'outcome') |"
    assert measures.startswith("ok measures, ")
    child = json.loads((tmp_path / "results.json").read_text())["questions"]["items"]["child"]["pid"]
    assert gone(child, 10), "what the step started lives on"


# ---- the real steps, without a GPU -------------------------------------------------------------------------------------------


# A sample of each step: `tests/gpu/run_all.py FOLDER --double` and `--simulated` take everything (docs/gpu-tests.md).


def only(monkeypatch: pytest.MonkeyPatch, step: str, *items: str) -> None:
    """Let the step take these items only."""
    more = tuple(f"--only={item}" for item in items)
    whole = run_all.STEPS[step]
    assert whole.simulated is not None
    assert whole.double is not None
    small = replace(whole, simulated=(*whole.simulated, *more), double=(*whole.double, *more))
    monkeypatch.setitem(run_all.STEPS, step, small)


def test_on_a_double_of_the_driver_the_table_tells_speeds_and_says_that_they_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, "offload", "native-16", "offload-16-huge")
    steps = ("torch", "managed", "phases", "small-pages", "offload")
    assert main([str(tmp_path), "--double", *(f"--only={step}" for step in steps)]) == 0
    lines = summary(tmp_path)
    assert "a double of driver 580.65.06: its times say nothing about GPUs" in lines
    text = "\n".join(lines)
    for wanted in (
        "| native-16 | answered |",
        "|  | the driver's own | checkpoint ",
        "| offload-16-huge | answered |",
        "|  | round 2 | out ",
        "| 64 MiB | 112 MiB moved | suspend ",
        "| pinned copies, huge pages: ",
        "not here torch: needs torch on a GPU",
        "not here managed: needs torch on a GPU",
    ):
        assert wanted in text, text
    assert "CHANGED" not in text
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["small-pages"]["phases"]["small_pages"] is True
    saved = found["phases"]["phases"]["sizes"][-1]["host_while_saved_mib"]
    assert saved["Anonymous"] > 64, "what was saved is not in the process's memory"


def test_the_tests_with_kernels_run_on_a_double_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = (*run_all._PYTEST, *run_all._BROKER, "-k", "really_free")
    monkeypatch.setattr(run_all, "STEPS", {"tests": Step(arguments=arguments, longest_s=120, part=1)})
    assert main([str(tmp_path), "--double"]) == 0, (tmp_path / "tests.log").read_text()
    assert summary(tmp_path)[2].startswith("| test_memory_is_really_free_while_a_kernel_is_suspended | passed |")
    found = json.loads((tmp_path / "results.json").read_text())["tests"]
    seen = found["tests"]["test_memory_is_really_free_while_a_kernel_is_suspended"]["saw"]
    assert seen["saved_mib"] >= 4 * 64, "the kernel held nothing of the double's"
    assert found["double"] is True


def test_on_a_simulated_device_the_steps_run_or_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, "questions", "mapped", "plain", "calls-while-locked", "stopped")
    only(monkeypatch, "offload", "offload-16-huge")
    assert main([str(tmp_path), "--simulated", "--only=questions", "--only=offload", "--only=phases"]) == 0
    lines = summary(tmp_path)
    assert "a simulated device: its times say nothing about GPUs" in lines
    assert "|  | its memory | intact |" in lines
    assert "| offload-16-huge | not here | needs a driver, a simulated device has none |" in lines
    rows = json.loads((tmp_path / "results.json").read_text())["questions"]["items"]
    assert rows["plain"]["saw"]["intact"] is True
    assert rows["calls-while-locked"]["saw"]["a call while saved"] == "waits"
    assert rows["calls-while-locked"]["saw"]["then"] == {"intact": True}
    assert rows["stopped"]["saw"]["intact"] is True
    assert rows["mapped"]["why"] == "needs a driver, a simulated device has none"


# ---- figures -----------------------------------------------------------------------------------------------------------------


def results(folder: Path, machine: dict[str, Any], **steps: Any) -> Path:  # noqa: ANN401 - JSON
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"machine": machine, "steps": dict.fromkeys(steps, "ok"), **steps}))
    return folder


def test_figures_name_device_and_driver_and_put_the_parts_of_a_run_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row: dict[str, Any] = {
        "held_mib": 8192,
        "moved_mib": 8704,
        "shrinking": False,
        "suspend_s": 4.25,
        "suspend_gb_per_s": 2.1,
    }
    row |= {"resume_s": 1.5, "resume_gb_per_s": 6.1, "phases_s": {"checkpoint": 4.2, "restore": 1.4}}
    phases = {"pinned_copies_gb_per_s": {"to_device": 50.1, "to_host": 52.2}, "thp": "madvise", "sizes": [row]}
    speed = {"seconds": 0.2, "gb_per_s": 43.0}
    rounds = {"round 1": {"intact": True, "out": speed, "back": speed}}
    offload = {"items": {"offload-8192-huge": {"outcome": "answered", "seconds": 9, "saw": rounds}}}
    first = results(tmp_path / "one", H100, phases={"phases": phases})
    second = results(tmp_path / "two", H100, offload=offload)
    monkeypatch.setattr(figures, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(figures, "_see", lambda *_: None)
    assert figures.main([str(first), str(second), "--record"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Measured on NVIDIA H100 80GB HBM3, driver 580.159.04, ")
    assert (
        "| 8192 MiB | 8704 MiB moved | suspend 4.25 s, 2.1 GB/s | resume 1.50 s, 6.1 GB/s | checkpoint 4.20 s, restore 1.40 s |"
        in out
    )
    assert "|  | round 1 | out 0.2 s (43.0 GB/s), back 0.2 s (43.0 GB/s), intact |" in out
    recorded = tmp_path / "recorded" / "nvidia-h100-80gb-hbm3-580.159.04.json"
    assert figures.main([str(recorded)]) == 0
    assert capsys.readouterr().out == out


def test_a_recorded_run_is_a_row_of_the_devices_that_were_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "nvidia.md"
    before = (ROOT / "docs" / "nvidia.md").read_text()
    document.write_text(before)
    monkeypatch.setattr(figures, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(figures, "_NVIDIA", document)

    def recorded(folder: str, machine: dict[str, Any], result: int) -> str:
        rows = {
            "mapped": {"outcome": "answered", "seconds": 1, "saw": {"cycle": {"lock": {"result": 0}}}},
            "jax": {"outcome": "answered", "seconds": 1, "saw": {"cycle": {"lock": {"result": result}}}},
        }
        tests = {"tests": {"test_one": {"saw": {}, "outcome": "passed"}, "test_two": {"saw": {}}}}
        found = results(tmp_path / folder, machine, questions={"items": rows}, tests=tests)
        assert figures.main([str(found), "--record"]) == 0
        return document.read_text()

    key = "| 580.159.04 | NVIDIA H100 80GB HBM3 | saved and brought back: mapped"
    ends = "1 of 2 tests passed; nvidia-h100-80gb-hbm3-580.159.04.json |"
    assert f"{key}; not: jax; {ends}\n" in recorded("one", H100, 801)
    again = recorded("two", H100, 0)
    assert f"{key}, jax; not: none; {ends}\n" in again
    assert again.count("| 580.159.04 | NVIDIA H100 ") == 1, "the earlier row stayed"
    other = recorded("three", {**H100, "driver": "615.10"}, 0)
    assert "| 580.159.04 | NVIDIA H100 " in other
    assert "| 615.10 |" in other
    assert [line for line in other.splitlines() if not line.startswith(("| 580.159.04 | NVIDIA H100", "| 615.10"))] == [
        line for line in before.splitlines() if not line.startswith("| none")
    ]
