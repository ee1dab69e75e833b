"""Promises of the experiments for a GPU machine (tests/gpu/items.py and its users), on the simulated device and a double of the driver."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.driver_double import releases
from tests.driver_double.double import Device, DriverDouble
from tests.gpu.facts import facts
from tests.gpu.talk import gone
from tests.support.paths import PYTHONPATH

CONTEXT_MIB = 48


def run(
    module: str, folder: Path, *arguments: str, double: DriverDouble | None = None, bindings: str = "newest"
) -> tuple[int, dict[str, Any]]:
    """Run a module's items, and return its status and each item's row."""
    file = folder / "found.json"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    if double is not None:
        given = double.environment(bindings)
        environment |= {**given, "PYTHONPATH": os.pathsep.join([PYTHONPATH, given["PYTHONPATH"]])}
    where = "--simulated" if double is None else "--small"
    command = [sys.executable, "-P", "-m", module, where, "--json", str(file), *arguments]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert file.exists(), done.stderr
    rows: dict[str, Any] = json.loads(file.read_text())["items"]
    return done.returncode, rows


@pytest.fixture
def double(tmp_path: Path) -> DriverDouble:
    host = DriverDouble(tmp_path / "host", devices=(Device(mib=1024),))
    host.set(context_mib=CONTEXT_MIB)
    return host


# ---- one that hangs or crashes stops none of the others ----------------------------------------------------------------------


def test_items_that_hang_crash_fail_or_lack_something_are_told_apart_and_the_others_go_on(tmp_path: Path) -> None:
    others = ("hangs", "crashes", "fails", "lacks", "torch", "driver", "answers")
    status, rows = run("tests.gpu_nvidia.stuck_items", tmp_path, *(f"--only={name}" for name in others))
    assert status == 1
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {
        "hangs": "not done within 2 s",
        "crashes": "failed (status -11)",
        "fails": "failed (status 1)",
        "lacks": "not here",
        "torch": "not here",
        "driver": "not here",
        "answers": "answered",
    }
    assert rows["answers"]["saw"] == {"answer": 42}
    assert rows["crashes"]["saw"] == {"before": "the crash"}, "what it saw before it died is lost"
    assert rows["fails"]["why"] == "ValueError: this is wrong"
    assert [rows[name]["why"] for name in ("lacks", "torch", "driver")] == [
        "there are no such pages",
        "needs no_such_package",
        "needs a driver, a simulated device has none",
    ]
    assert gone(rows["hangs"]["saw"]["child"], 10), "what the item started lives on"


# ---- questions ---------------------------------------------------------------------------------------------------------------


def test_the_questions_are_answered_on_a_double_as_it_plays_them(double: DriverDouble, tmp_path: Path) -> None:
    double.set(nvml_tells_memory=True, init_only_listed="zero", forked_known=True, forked_restore=1)
    asked = (
        "plain",
        "without-context",
        "forked",
        "kinds-of-memory",
        "cu-init",
        "no-cuda",
        "thread-made",
        "mapped",
        "forked-job-file",
    )
    status, rows = run("tests.gpu.questions", tmp_path, *(f"--only={name}" for name in asked), double=double)
    assert status == 0, rows
    saw = {name: row["saw"] for name, row in rows.items()}
    assert all("left_mib" not in row for row in rows.values())
    plain = saw["plain"]
    assert plain["process"]["nvml"] == {"list": "compute", "mib": CONTEXT_MIB + 16.0}
    assert [plain[phase]["result"] for phase in ("lock", "checkpoint", "restore", "unlock")] == [0, 0, 0, 0]
    assert plain["saved"]["state"]["value"] == 2
    assert plain["saved"]["nvml"] is None
    assert plain["intact"] is True
    assert plain["host_saved_mib"]["Anonymous"] - plain["host_before_mib"]["Anonymous"] == pytest.approx(16, abs=1)
    assert plain["saved_lies_in"][0]["grown_mib"] == pytest.approx(16, abs=1)
    for when in ("after cuInit", "after the count"):
        assert saw["without-context"][when]["nvml"] == {"list": "compute", "mib": 0.0}
    assert saw["without-context"]["with a context"]["nvml"]["mib"] == CONTEXT_MIB
    assert saw["forked"]["child"]["state"]["result"] == 0
    assert saw["forked"]["parent intact"] is True
    assert saw["forked"]["intact after both"] is True
    assert "/memfd:job (deleted)" in saw["forked-job-file"]["child's files"]
    assert "/memfd:job (deleted)" not in saw["forked"]["child's files"]
    assert saw["thread-made"]["by the process's number"]["nvml"]["mib"] == CONTEXT_MIB + 32
    assert saw["mapped"]["intact"] is True
    assert facts("mapped", saw["mapped"])[2][1].startswith("whole cycle ok, lock ")
    assert saw["no-cuda"]["without CUDA"]["state"]["result"] == 3
    assert saw["cu-init"]["caller on the device, MiB"] == 0
    assert saw["kinds-of-memory"]["managed, beside plain"]["files"] == {"/memfd:device memory (deleted)": -1}
    assert isinstance(saw["kinds-of-memory"]["import"], dict), saw["kinds-of-memory"]["import"]


def test_questions_about_a_stopped_process_have_time_limits(double: DriverDouble, tmp_path: Path) -> None:
    status, rows = run("tests.gpu.questions", tmp_path, "--only=stopped", double=double)
    assert status == 0, rows
    saw = rows["stopped"]["saw"]
    assert saw["lock while stopped"] == "no answer within 2 s of a lock with a limit of 1 s"
    assert saw["the lock after it goes on"]["result"] == 0
    assert saw["intact"] is True


def test_what_surrounds_a_target_is_told_or_not_to_be_had_here(double: DriverDouble, tmp_path: Path) -> None:
    asked = ("machine", "memory-total", "net-namespace", "pid-namespace", "memory-limits", "torch-loader", "numba")
    status, rows = run("tests.gpu.questions", tmp_path, *(f"--only={name}" for name in asked), double=double)
    assert status == 0, rows
    assert rows["machine"]["saw"]["device"]["driver"] == "580.65.06"
    assert rows["machine"]["saw"]["packages"]["nvidia-ml-py"]
    assert rows["memory-total"]["saw"]["touched"]["mib"] > 0
    assert rows["memory-limits"]["outcome"] == "not here"
    assert rows["torch-loader"]["why"] == "needs torch"
    for name in ("net-namespace", "pid-namespace"):
        if rows[name]["outcome"] == "answered":  # it needs root
            assert rows[name]["saw"]["intact"] is True


# ---- constants and spoilers --------------------------------------------------------------------------------------------------


# ---- the offload probe -------------------------------------------------------------------------------------------------------


def test_the_offload_probe_maps_again_at_the_same_addresses_and_leaves_nothing_mapped_while_it_is_saved(
    double: DriverDouble, tmp_path: Path
) -> None:
    arguments = ("--sizes", "48", "--only=offload-48-huge", "--only=native-48")
    status, rows = run("tests.gpu.offload_probe", tmp_path, *arguments, double=double)
    assert status == 0, rows
    saw = rows["offload-48-huge"]["saw"]
    for number in (1, 2):
        one = saw[f"round {number}"]
        assert one["intact"] is True
        assert one["device_mib"]["unmapped"] - one["device_mib"]["before"] == CONTEXT_MIB
        assert one["device_mib"]["saved"] == one["device_mib"]["before"]
    assert set(saw["round 1"]["steps"]) == {
        *("copy_out", "unmap", "lock", "checkpoint", "restore", "unlock", "map", "copy_back")
    }
    assert "map_and_copy_back" in saw["round 2"]["steps"]
    assert rows["native-48"]["saw"]["intact"] is True

    calls = double.calls()
    pid = next(call.pid for call in calls if call.name == "cuMemAddressReserve")
    of_it = [
        call for call in calls if call.name == "cuCheckpointProcessCheckpoint" and int(call.arguments["pid"]) == pid
    ]
    saved = [call.began_us for call in of_it]
    assert len(saved) == 2
    own = [call for call in calls if call.pid == pid]
    mapped = [call.arguments["pointer"] for call in own if call.name == "cuMemMap"]
    whole = mapped[: saw["addresses"]["chunks"]]
    assert len(set(whole)) == 4
    # After each restore the first chunk is mapped once to see whether the addresses are still reserved.
    assert mapped == [*whole, whole[0], *whole, whole[0], *whole], "the addresses differ"
    assert saw["round 1"]["reserved"] is True
    for at in saved:
        before = [call.name for call in own if call.began_us < at]
        assert before.count("cuMemMap") == before.count("cuMemUnmap"), "something is mapped while it is saved"
        assert before.count("cuMemCreate") == before.count("cuMemRelease")
    streams = {call.arguments["stream"] for call in own if call.name == "cuMemcpyDtoHAsync"}
    assert len(streams) == 2


def test_the_offload_probe_continues_with_an_arena_registered_again_if_the_driver_refuses_it(
    double: DriverDouble, tmp_path: Path
) -> None:
    """By the oldest bindings; the newest are in the test before."""
    double.fail("cuCheckpointProcessCheckpoint", 801)
    arguments = ("--sizes", "16", "--only=offload-16-small")
    status, rows = run("tests.gpu.offload_probe", tmp_path, *arguments, double=double, bindings=releases.oldest())
    assert status == 0, rows
    saw = rows["offload-16-small"]["saw"]
    assert saw["round 1"]["refused"]["checkpoint"]["result"] == 801
    assert saw["registered anew: round 2"]["intact"] is True
    assert {"register", "unregister"} <= set(saw["registered anew: round 2"]["steps"])
