"""The commands for leases and devices: what each sends, prints, answers as JSON and refuses; one row for each command."""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fractional_gpu.commands.lease_commands import COMMANDS, DeviceCommand, find_lease, render_story
from fractional_gpu.commands.main import main
from fractional_gpu.commands.terminal.text import CommandError, plain
from fractional_gpu.core.model import Slowdown
from fractional_gpu.protocol.errors import ConflictError
from fractional_gpu.protocol.status import Story, StoryLine
from tests.commands.conftest import OwnBroker
from tests.commands.pictures import a_lease

LEASE, GPU = "train.ipynb (lease-1): ", "GPU 0 (H100): "


@dataclass(frozen=True)
class Row:
    """`prints` follows the lease's or GPU's name. `sent`: the body of the request. `answer`: what --json prints, at least."""

    prints: str
    options: str = ""
    sent: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=lambda: {"kernel_id": "kernel-1"})
    target: str = "kernel-1"
    state: str = "resident"
    kind: str = "kernel"


DEVICE: dict[str, Any] = {"device_id": "GPU-0"}
MOVED: dict[str, Any] = {"errors": []}
DONE: dict[str, Any] = {"ok": True}
ROWS = {
    "suspend": Row("holds no GPU memory, so there was nothing to save", answer=MOVED),
    "resume": Row("on the GPU (H100)", answer=MOVED, state="suspended"),
    "pin": Row("stays on the GPU for the next 10 min", "30m", {"duration_ms": 1_800_000}),
    "unpin": Row("no longer pinned"),
    "release": Row("released", answer=DONE, kind="claim"),
    "resize": Row(
        "was 1/4 of a GPU with 2 GiB, is now 1/2 of a GPU with 2 GiB",
        "1/2 --memory 20GiB --wait 0",
        {"fraction_milli": 500, "memory_mib": 20_480, "wait_ms": 0, "burst": False},
    ),
    "explain": Row("on the GPU, idle, 0 ms, pinned for 10 min", answer={"lease_id": "lease-1", "lines": []}),
    "drain": Row(
        "draining, kernels still hold 512 MiB there",
        "--evict-busy --deadline 2m",
        {"evict_busy": True, "deadline_in_ms": 120_000},
        DEVICE,
        "GPU-0",
    ),
    "undrain": Row("in use again", answer=DEVICE, target="GPU-0"),
    "move": Row("now on GPU-1", "--to 1", {"device": "1"}),
    "evict": Row("ended", "--confirm --why maintenance", {"confirm": True, "why": "maintenance"}, DONE),
    "end": Row("ended", answer=DONE),
}
ROUTES = {"explain": "story"}  # of the others: the command's name
WHICH, ONE_GPU = "name the leases to", "name one GPU, for example 0, or use --all"
PIN, TIME = (
    "is not a valid duration for a pin; use one such as 30m or 2h",
    "invalid duration 'long'",
)
WRONG = {
    "suspend": WHICH,
    "suspend 3f --all": WHICH,
    "resume": WHICH,
    "pin kernel-1 soon": f"'soon' {PIN}",
    "pin kernel-1 0": f"'0' {PIN}",
    "pin kernel-1 forever": "`%gpu pin always` in the notebook keeps renewing one",
    "pin forever": "only 'forever' was given; add a duration, as in `jupyter gpu pin LEASE 30m`",
    "resize kernel-1": "give the new size: a FRACTION such as 1/2, a --memory such as 20GiB, or both",
    "resize kernel-1 2": "fraction '2' is out of range",
    "resize kernel-1 --memory much": "memory 'much' is not a valid size",
    "resize kernel-1 1/2 --wait long": TIME,
    "drain 0 --wait long": TIME,
    "drain 0 --deadline long": TIME,
    **{f"{name} {given}": ONE_GPU for name in ("drain", "undrain") for given in ("", "0 --all", "''", "'' --all")},
    "lease": "give the GPU memory with --memory, for example: jupyter gpu lease --memory 9GiB --ttl 10m",
    "lease --memory much": "memory 'much' is not a valid size",
    "lease --memory 1GiB --ttl long": TIME,
    "lease --memory 1GiB --wait long": TIME,
    "lease --memory 1GiB --holder self": "--holder must be a whole number from 1",
    "lease --memory 1GiB --json -- true": "--holder and --json cannot be used with a program",
    "evict kernel-1": "all its variables are lost: add --confirm to do it anyway",
}


def words(name: str, row: Row) -> list[str]:
    return [name, row.target, *row.options.split()]


@pytest.fixture
def lease(broker: OwnBroker) -> str:
    return broker.add("resident", kernel_id="kernel-1", label="train.ipynb")


@pytest.mark.usefixtures("lease")
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_asks_for_its_change_and_prints_it(
    name: str, broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ROWS[name]
    broker.leases["lease-1"].state = row.state
    broker.lease_fields = {"device_id": "GPU-1", "device_name": "H100", "pinned_ms": 600_000, "kind": row.kind}
    assert main(words(name, row)) == 0
    about, target = (GPU, "GPU-0") if row.target == "GPU-0" else (LEASE, "lease-1")
    assert capsys.readouterr() == (f"{about}{row.prints}\n", "")
    asked = broker.calls[-1]
    assert (asked.route, asked.lease_id, asked.body) == (ROUTES.get(name, name), target, row.sent)
    assert main([*words(name, row), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).items() >= row.answer.items()


@pytest.mark.usefixtures("lease")
@pytest.mark.parametrize("name", COMMANDS)
def test_each_refusal_names_the_kernel_and_the_reason(
    name: str, broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ROWS[name]
    broker.lease_fields = {"kind": row.kind}
    broker.fail[ROUTES.get(name, name)] = ConflictError("that is more than the pool allows; ask for less")
    assert main(words(name, row)) == 1
    about = "" if row.target == "GPU-0" else LEASE
    refused = f"jupyter gpu: {about}that is more than the pool allows; ask for less\n"
    assert capsys.readouterr() == ("", refused)


@pytest.mark.parametrize("given", WRONG)
def test_each_wrong_value_is_refused_before_the_broker_is_asked(
    given: str, broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(given)) == 2
    assert WRONG[given] in capsys.readouterr().err
    assert broker.calls == []


@pytest.mark.parametrize("name", [*COMMANDS, "pool", "capacity", "seats"])
def test_without_a_broker_each_command_says_what_its_reader_can_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(tmp_path / "b.sock"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    says = "so no kernels are on a GPU; the first kernel that needs one starts a broker"
    if isinstance(COMMANDS.get(name), DeviceCommand):
        says = "without one, no GPU can be drained or put back into use; start one with `jupyter gpu broker`"
    if name == "pool":
        says = "only a running broker can show or change its pools; start one with `jupyter gpu broker`"
        assert main(["pool", "default", "price=3"]) == 1
        assert "jupyter_gpu_config.py sets the initial values" in capsys.readouterr().err
    assert main(words(name, ROWS[name]) if name in ROWS else [name]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"jupyter gpu: no broker is running on {tmp_path}/b.sock, ")
    assert says in said


@pytest.mark.usefixtures("lease")
def test_a_kernel_is_not_taken_for_a_claim(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["release", "kernel-1"]) == 1
    assert (
        capsys.readouterr().err
        == "jupyter gpu: train.ipynb (lease-1) is a kernel, not a claim made with `jupyter gpu lease`\n"
    )
    assert broker.calls[-1].route == "status"


# -- several leases ---------------------------------------------------------------------------------------------------------


LEASES = [
    a_lease(lease_id="3f2a9c1b77d0", kernel_id="kernel-1", label="train.ipynb"),
    a_lease(lease_id="3f99aabbccdd", kernel_id="kernel-2"),
    a_lease(lease_id="77", kernel_id="kernel-3"),
    a_lease(lease_id="7700", kernel_id=""),
]


@pytest.mark.parametrize(("name", "found"), [("3f2a9c1b77d0", 0), ("3f2", 0), ("kernel-2", 1), ("77", 2), ("770", 3)])
def test_a_lease_is_found_by_its_id_its_beginning_or_its_kernel(name: str, found: int) -> None:
    assert find_lease(name, LEASES) is LEASES[found]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("3f", r"'3f' matches train.ipynb \(3f2a9c1b\), 3f99aabb; give a longer part"),
        *((name, rf"no lease matches '{name}'; the leases are train.ipynb") for name in ("", "nothing", "kernel")),
    ],
)
def test_a_name_of_none_or_several_lists_what_there_is(name: str, says: str) -> None:
    with pytest.raises(CommandError, match=says):
        find_lease(name, LEASES)


def test_all_means_those_that_can_be_moved(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (broker.add(state) for state in ("resident", "suspended", "unarmed"))
    assert main(["suspend", "--all", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [lease["lease"]["spec"]["lease_id"] for lease in shown["leases"]] == [first]
    assert main(["resume", "--all"]) == 0
    states = [broker.leases[lease_id].state for lease_id in (first, second, third)]
    assert states == ["resident", "resident", "unarmed"]
    capsys.readouterr()
    assert main(["resume", "--all"]) == 0
    assert capsys.readouterr().out == "There is nothing to resume.\n"


def test_a_refusal_is_told_and_the_others_are_tried_all_the_same(
    broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.add("resident", label="one")
    broker.add("resident", label="two")
    broker.fail["suspend"] = ConflictError("it is busy; wait for its cell")
    assert main(["suspend", "--all", "--json"]) == 1
    captured = capsys.readouterr()
    assert [error["message"] for error in json.loads(captured.out)["errors"]] == ["it is busy; wait for its cell"] * 2
    assert captured.err.splitlines() == [
        f"jupyter gpu: {name}: it is busy; wait for its cell" for name in ("one (lease-1)", "two (lease-2)")
    ]


# -- stories and waits ------------------------------------------------------------------------------------------------------


def test_a_story_is_told_line_by_line_and_ends_with_how_it_stands() -> None:
    lines = [
        StoryLine(at_ms=0, reason="lease.admitted", sentence="it was admitted"),
        StoryLine(at_ms=1_750_000_000_000, reason="suspend.idle", sentence="it was idle for 5 min"),
    ]
    lease = a_lease(
        state="suspended",
        label="train.ipynb",
        position=2,
        sentence="2 GiB is needed",
        expected_ms=40_200,
        expected_bounds_ms=(10_000, 120_000),
    )
    story = Story(lease_id="x", lines=lines, omitted=7)
    text = plain(render_story(lease, story, 1_750_000_000_000))
    slowed = replace(story, slowdown=Slowdown(brief="runs next to b.ipynb, about 1.3 times as long as alone"))
    assert plain(render_story(lease, slowed, 1_750_000_000_000)) == f"{text}slowed down: {slowed.slowdown.sentence}\n"
    told = text.splitlines()
    assert told[0] == "... 7 older lines"
    assert told[1].startswith("19")  # 1970, or 1969 west of Greenwich: not today
    assert told[1].endswith("  it was admitted  (lease.admitted)")
    assert told[2][2] == ":"
    assert told[3] == (
        "train.ipynb (3f2a9c1b): suspended, 12 s; waiting at place 2 in the queue: 2 GiB is needed; about 40 s (10 s to 2 min)"
    )


@pytest.mark.parametrize(("left_mib", "wait", "code"), [([512, 0], "1h", 0), ([512], "0", 1)])
def test_a_drain_that_waits_ends_when_the_device_is_empty_or_its_time_over(
    left_mib: list[int], wait: str, code: int, broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.devices = [replace(broker.device, reserved_mib=mib) for mib in left_mib]
    assert main(["drain", "0", "--wait", wait]) == code
    said = capsys.readouterr()
    if code:
        assert (
            "GPU 0 was not empty after 0 ms: kernels still hold 512 MiB; wait longer, or add --evict-busy" in said.err
        )
    else:
        assert said.out == f"{GPU}draining, no kernel holds memory there\n"
