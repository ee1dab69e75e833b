"""`jupyter gpu pin`, `unpin`, `resize`, `explain`, `drain` and `undrain`."""

import json
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from fractional_gpu.commands.lease_commands import render_story
from fractional_gpu.commands.main import main
from fractional_gpu.commands.terminal.render import render_leases, render_status
from fractional_gpu.commands.terminal.text import plain
from fractional_gpu.core.model import Slowdown
from fractional_gpu.protocol.errors import ConflictError
from fractional_gpu.protocol.messages import ResizeRequest
from fractional_gpu.protocol.status import Story, StoryLine
from tests.commands.conftest import OwnBroker
from tests.commands.pictures import a_device, a_host, a_lease


def test_a_kernel_is_pinned_for_the_time_that_was_said(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    lease_id = broker.add("resident", kernel_id="kernel-1", label="train.ipynb")
    assert main(["pin", "kernel-1", "30m"]) == 0
    assert broker.bodies("pin") == [{"duration_ms": 1_800_000}]
    assert capsys.readouterr().out.startswith(f"train.ipynb ({lease_id}): stays on the GPU for ")
    assert main(["unpin", "kernel-1"]) == 0
    assert broker.routes()[-1] == "unpin"
    assert main(["pin", "kernel-1", "2h", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lease"]["spec"]["lease_id"] == lease_id


def test_a_kernel_is_resized_to_what_was_said(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.add("resident", kernel_id="kernel-1")
    assert main(["resize", "kernel-1", "1/2", "--memory", "20GiB", "--wait", "0"]) == 0
    assert broker.bodies("resize") == [to_builtins(ResizeRequest(fraction_milli=500, memory_mib=20_480, wait_ms=0))]
    assert "was 1/4 of a GPU with 2 GiB, is now 1/2 of a GPU with 2 GiB" in capsys.readouterr().out
    assert main(["resize", "kernel-1", "--memory", "1GiB"]) == 0
    assert broker.bodies("resize")[-1] == to_builtins(ResizeRequest(memory_mib=1024))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["pin", "kernel-1", "soon"],
            "'soon' is not a valid duration for a pin; allowed: a duration such as 30m or 2h",
        ),
        (["pin", "kernel-1", "0"], "'0' is not a valid duration for a pin; allowed: a duration such as 30m or 2h"),
        (["pin", "kernel-1", "forever"], "`%gpu pin always` in the notebook keeps renewing one"),
        (["pin", "forever"], "only 'forever' was given; add a duration, as in `jupyter gpu pin LEASE 30m`"),
        (["resize", "kernel-1"], "give the new size: a FRACTION such as 1/2, a --memory such as 20GiB, or both"),
        (["resize", "kernel-1", "2"], "fraction '2' is out of range"),
        (["resize", "kernel-1", "--memory", "much"], "memory 'much' is not a size"),
        (["resize", "kernel-1", "1/2", "--wait", "long"], "duration 'long' is not a duration"),
        (["drain", "0", "--wait", "long"], "duration 'long' is not a duration"),
    ],
)
def test_a_value_that_is_not_allowed_is_wrong_usage(
    arguments: list[str], says: str, broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
    assert broker.calls == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["drain", "0"], "without one, GPUs neither take kernels nor drain; start one with `jupyter gpu broker`"),
        (["undrain", "0"], "without one, GPUs neither take kernels nor drain; start one with `jupyter gpu broker`"),
        (["pool"], "only a running broker can show or change its pools; start one with `jupyter gpu broker`"),
        (["pool", "default", "price=3"], "jupyter_gpu_config.py sets the initial values"),
        (["pin", "3f2a", "30m"], "so no kernels are on a GPU; the first kernel that wants one starts a broker"),
    ],
)
def test_without_a_broker_each_command_says_what_its_reader_can_do(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(tmp_path / "b.sock"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"jupyter gpu: no broker is running on {tmp_path}/b.sock, ")
    assert says in said


@pytest.mark.parametrize(
    ("route", "arguments"), [("pin", ["pin", "kernel-1", "9h"]), ("resize", ["resize", "kernel-1", "1"])]
)
def test_a_refusal_names_the_kernel_and_the_reason(
    route: str, arguments: list[str], broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.add("resident", kernel_id="kernel-1", label="train.ipynb")
    broker.fail[route] = ConflictError("that is more than the pool allows; ask for less")
    assert main(arguments) == 1
    assert capsys.readouterr() == (
        "",
        "jupyter gpu: train.ipynb (lease-1): that is more than the pool allows; ask for less\n",
    )


def test_a_story_is_told_line_by_line_and_ends_with_how_it_stands() -> None:
    lines = [
        StoryLine(at_ms=0, reason="lease.admitted", sentence="it was admitted"),
        StoryLine(at_ms=1_750_000_000_000, reason="suspend.idle", sentence="it was idle for 5 min"),
    ]
    lease = a_lease(
        state="suspended",
        label="train.ipynb",
        position=2,
        sentence="2 GiB are needed",
        expected_ms=40_200,
        expected_bounds_ms=(10_000, 120_000),
    )
    story = Story(lease_id="x", lines=lines, omitted=7)
    text = plain(render_story(lease, story, 1_750_000_000_000))
    slowed = replace(story, slowdown=Slowdown(brief="runs beside b.ipynb, about 1.3 times as long as alone"))
    assert plain(render_story(lease, slowed, 1_750_000_000_000)) == f"{text}slowed down: {slowed.slowdown.sentence}\n"
    told = text.splitlines()
    assert told[0] == "... 7 older lines"
    assert told[1].startswith("19")  # 1970, or 1969 west of Greenwich: not today
    assert told[1].endswith("  it was admitted  (lease.admitted)")
    assert told[2][2] == ":"
    assert told[3] == (
        "train.ipynb (3f2a9c1b): suspended, 12 s; waits at place 2: 2 GiB are needed; about 40 s (10 s to 2 min)"
    )


def test_a_story_is_read_from_the_broker(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.add("resident", kernel_id="kernel-1", label="train.ipynb")
    assert main(["explain", "kernel-1"]) == 0
    assert capsys.readouterr().out.startswith("train.ipynb (lease-1): on the GPU, idle")
    assert main(["explain", "kernel-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "lease_id": "lease-1",
        "lines": [],
        "omitted": 0,
        "slowdown": {"milli": 1000, "low_milli": 1000, "high_milli": 1000, "brief": ""},
    }


def test_a_device_is_drained_and_undrained(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "GPU-0", "--evict-busy"]) == 0
    assert (broker.calls[-1].route, broker.calls[-1].lease_id, broker.calls[-1].body) == (
        "drain",
        "GPU-0",
        {"evict_busy": True},
    )
    assert capsys.readouterr().out == "GPU 0 (H100): draining, kernels still hold 512 MiB there\n"
    assert main(["undrain", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device_id"] == "GPU-0"


@pytest.mark.parametrize(
    "arguments",
    [["drain"], ["drain", "0", "--all"], ["undrain"], ["undrain", "0", "--all"], ["drain", ""], ["drain", "", "--all"]],
)
def test_one_device_is_named_or_all_are_meant(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) != 0
    assert "name one GPU, for example 0, or say --all" in capsys.readouterr().err


def test_whoever_waits_returns_when_the_device_is_empty(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.devices = [replace(broker.device, reserved_mib=mib) for mib in (512, 0)]
    assert main(["drain", "0", "--wait", "1h"]) == 0
    assert capsys.readouterr().out == "GPU 0 (H100): draining, no kernel holds memory there\n"


def test_whoever_waits_in_vain_is_told_and_the_code_says_so(
    broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.device = replace(broker.device, index=3)
    assert main(["drain", "0", "--wait", "0"]) == 1
    assert "GPU 3 was not empty after 0 ms: kernels still hold 512 MiB; wait longer, or add --evict-busy" in (
        capsys.readouterr().err
    )


def test_the_status_tells_of_pins_forecasts_and_emptied_devices() -> None:
    lease = a_lease(pinned_ms=600_000)
    assert "on the GPU, idle, 12 s, pinned for 10 min" in plain(render_leases([lease]))
    waiting = a_lease(
        state="suspended", position=1, sentence="8 GiB are needed", expected_ms=30_000, expected_bounds_ms=(900, 61_000)
    )
    assert "8 GiB are needed; about 30 s (up to 1 min)" in plain(render_leases([waiting]))
    shown = plain(render_status(a_host(devices=[a_device(draining=True)], leases=[])))
    assert "draining: it accepts no new kernels" in shown
