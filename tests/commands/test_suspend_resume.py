"""`jupyter gpu suspend` and `jupyter gpu resume`."""

import json

import pytest

from fractional_gpu.commands.lease_commands import find_lease
from fractional_gpu.commands.main import main
from fractional_gpu.commands.terminal.text import CommandError
from fractional_gpu.protocol.errors import ConflictError
from tests.commands.conftest import OwnBroker
from tests.commands.pictures import a_lease

LEASES = [
    a_lease(lease_id="3f2a9c1b77d0", kernel_id="kernel-1", label="train.ipynb"),
    a_lease(lease_id="3f99aabbccdd", kernel_id="kernel-2"),
    a_lease(lease_id="77", kernel_id="kernel-3"),
    a_lease(lease_id="7700", kernel_id=""),
]


@pytest.mark.parametrize(
    ("name", "lease_id"),
    [
        ("3f2a9c1b77d0", "3f2a9c1b77d0"),
        ("3f2", "3f2a9c1b77d0"),
        ("kernel-2", "3f99aabbccdd"),
        ("77", "77"),
        ("770", "7700"),
    ],
)
def test_a_lease_is_found_by_its_id_its_beginning_or_its_kernel(name: str, lease_id: str) -> None:
    assert find_lease(name, LEASES).lease_id == lease_id


def test_a_beginning_that_fits_several_is_refused_with_their_names() -> None:
    with pytest.raises(CommandError, match=r"'3f' matches train.ipynb \(3f2a9c1b\), 3f99aabb; give more"):
        find_lease("3f", LEASES)


@pytest.mark.parametrize("name", ["", "nothing", "kernel"])
def test_an_unknown_name_lists_what_there_is(name: str) -> None:
    with pytest.raises(CommandError, match=rf"there is no lease '{name}'; there are train.ipynb"):
        find_lease(name, LEASES)


def test_one_kernel_is_suspended_and_resumed_by_its_kernel_id(
    broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    lease_id = broker.add("resident", kernel_id="kernel-1", label="train.ipynb")
    assert main(["suspend", "kernel-1"]) == 0
    assert broker.leases[lease_id].state == "suspended"
    assert capsys.readouterr().out.startswith(f"train.ipynb ({lease_id[:8]}): ")
    assert main(["resume", lease_id]) == 0
    assert broker.leases[lease_id].state == "resident"
    assert capsys.readouterr().out == f"train.ipynb ({lease_id[:8]}): on the GPU\n"


def test_all_means_those_that_can_be_moved(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (broker.add(state) for state in ("resident", "suspended", "unarmed"))
    assert main(["suspend", "--all", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [lease["lease"]["spec"]["lease_id"] for lease in shown["leases"]] == [first]
    assert shown["errors"] == []
    assert main(["resume", "--all"]) == 0
    states = [broker.leases[lease_id].state for lease_id in (first, second, third)]
    assert states == ["resident", "resident", "unarmed"]


def test_nothing_to_move_is_said_and_is_no_failure(broker: OwnBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.add("resident")
    assert main(["resume", "--all"]) == 0
    assert capsys.readouterr().out == "There is nothing to resume.\n"


def test_a_refusal_is_told_and_the_others_are_moved_all_the_same(
    broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.add("resident", label="one")
    broker.add("resident", label="two")
    broker.fail["suspend"] = ConflictError("it is busy; wait for its cell")
    assert main(["suspend", "--all", "--json"]) == 1
    captured = capsys.readouterr()
    assert [error["message"] for error in json.loads(captured.out)["errors"]] == ["it is busy; wait for its cell"] * 2
    assert captured.err.splitlines() == [
        "jupyter gpu: one (lease-1): it is busy; wait for its cell",
        "jupyter gpu: two (lease-2): it is busy; wait for its cell",
    ]


@pytest.mark.parametrize("arguments", [["suspend"], ["suspend", "3f", "--all"], ["resume"]])
def test_neither_or_both_of_names_and_all_is_wrong_usage(
    arguments: list[str], broker: OwnBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "name the leases to" in capsys.readouterr().err
    assert broker.calls == []
