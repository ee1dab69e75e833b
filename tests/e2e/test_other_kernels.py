"""Kernels without our extension: the broker only listens at IOPub, and they still share a device and lose nothing."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from fractional_gpu.jupyter.kernelspecs import install
from tests.support.managed import entered
from tests.support.shared_server import SharedServer
from tests.support.stories import CHECK, fill
from tests.support.world import Server, World

pytestmark = pytest.mark.promise("race-stuck")

MIB = 8
BASH_FILL = """\
mkfifo ask$$ tell$$
{python} {holder} {seed} {mib} ask$$ tell$$ &
cat tell$$
word=of-kernel-{seed}
"""
BASH_CHECK = "echo all there? > ask$$; cat tell$$; echo $word"


@dataclass(frozen=True)
class Kind:
    base: Callable[[World], str]
    fill: Callable[[int], str]
    check: str
    says: Callable[[int], str]


def bash(world: World) -> str:
    spec = {"argv": [sys.executable, "-m", "bash_kernel", "-f", "{connection_file}"], "language": "bash"}
    return written(world, "bash", {**spec, "display_name": "Bash", "env": {"PS1": "$"}})


def bash_fill(seed: int) -> str:
    return BASH_FILL.format(python=sys.executable, holder=Path(__file__).with_name("holder.py"), seed=seed, mib=MIB)


def written(world: World, name: str, spec: Mapping[str, object]) -> str:
    folder = world.kernels_dir / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    return name


KINDS = {
    "bash": Kind(bash, bash_fill, BASH_CHECK, lambda seed: f"intact\nof-kernel-{seed}\n"),
    "xeus-python": Kind(
        lambda _world: "xpython", lambda seed: fill(seed, MIB) + "\nprint('filled')", CHECK, lambda _seed: "intact\n"
    ),
}


@pytest.fixture(scope="module")
def world(shared_server: SharedServer) -> Iterator[World]:
    """One broker for all tests of this file."""
    with shared_server.borrowed() as lent:
        yield lent


@pytest.mark.parametrize("name", KINDS)
def test_two_kernels_without_our_extension_take_turns_and_keep_their_state(
    world: World, server: Server, name: str
) -> None:
    kind = KINDS[name]
    with entered(world):
        base = kind.base(world)
        (spec,) = install("default", [750], base=base, directory=str(world.kernels_dir), simulated=True)
    assert not spec.gated
    first = server.start(spec.name)
    assert first.must(kind.fill(1)).text.replace("\r", "").endswith("filled\n")
    second = server.start(spec.name)  # for which the idle one first makes room
    assert world.await_state(first.kernel_id, "suspended").lease.saved_mib >= MIB
    assert second.must(kind.fill(2)).text.replace("\r", "").endswith("filled\n")
    for _ in range(2):
        for seed, running, other in ((1, first, second), (2, second, first)):
            assert running.must(kind.check).text.replace("\r", "") == kind.says(seed)
            world.await_state(running.kernel_id, "resident")
            world.await_state(other.kernel_id, "suspended")
    for notebook in (first, second):
        lease = world.lease(notebook.kernel_id)
        assert (lease.gated, lease.suspends >= 2, lease.resumes >= 2) == (False, True, True)
        notebook.shut_down()
