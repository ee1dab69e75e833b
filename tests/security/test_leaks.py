"""What must never be seen: a lease's token anywhere but in its file, and a stranger's text as a line of the log."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.protocol.messages import LeaseRequest
from tests.support.stories import CHECK, fill
from tests.support.victims import anybody, brokers, workers
from tests.support.world import Server, World, new_world


def run(world: World, *words: str) -> str:
    """Everything that a command prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "provisioner.commands.main", *words],
        env=world.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def processes(world: World) -> list[Path]:
    """The folders in /proc of everything that belongs to the world."""
    return [Path(f"/proc/{pid}") for pid in {*anybody(world), *brokers(world), *workers(world)}]


@pytest.fixture
def world() -> Iterator[World]:
    with new_world() as made:
        yield made


@pytest.fixture
def told() -> dict[str, str]:
    """All that a story of two kernels leaves to read, by where it is, with the tokens under `tokens`."""
    with new_world() as world, Server(world) as server:
        (name,) = world.install(750)
        first, second = server.start(name), server.start(name)
        first.must(fill(1))
        second.must(fill(2))
        first.must("%gpu explain")
        assert first.must(CHECK).text == "intact\n"
        lease_id = world.lease(first.kernel_id).lease_id
        texts = {
            "tokens": "\n".join(path.read_text() for path in (world.folder / "run").rglob("*.token")),
            "shown in the notebook": json.dumps(
                [first.run(line).data for line in ("%gpu", "%gpu top", "%gpu explain")]
            ),
            "the kernels' list": json.dumps(server.request("GET", "api/kernels")),
        }
        for words in (["status", "--json"], ["status"], ["explain", lease_id], ["doctor"], ["doctor", "--json"]):
            texts[f"jupyter gpu {' '.join(words)}"] = run(world, *words)
        run(world, "suspend", "no-such-lease")
        for folder in processes(world):
            for what in ("cmdline", "environ"):
                texts[f"{folder / what}"] = (folder / what).read_bytes().decode(errors="replace")
        world.end(brokers(world)[0], 15)
        for path in world.folder.rglob("*"):
            if path.is_file() and path.suffix != ".token":
                texts[str(path)] = path.read_bytes().decode(errors="replace")
        world.start_broker()
        return texts


def test_a_token_is_nowhere_but_in_its_file(told: dict[str, str]) -> None:
    tokens = told.pop("tokens").split()
    assert len(tokens) == 2
    assert any(name.endswith("broker.log") for name in told)
    assert any(name.endswith("server.err") for name in told)
    assert any(".sqlite" in name for name in told)
    assert any(name.startswith("/proc/") and "JUPYTER_GPU_TOKEN_FILE" in text for name, text in told.items())
    leaks = [name for name, text in told.items() for token in tokens if token in text]
    assert leaks == []


EVIL = "evil\n2026-01-01 00:00:00,000 INFO lease 12345678: granted\r\x1b[31mred\x1b[0m\u202e"


def test_text_of_strangers_makes_no_lines_in_the_log(world: World) -> None:
    world.start_broker()
    with world.client() as client:
        reply = client.create_lease(LeaseRequest(fraction_milli=250, label=EVIL, kernel_id=EVIL))
        shown = client.lease(reply.lease_id)
        client.release(reply.lease_id)
    log = Path(world.socket).with_name("broker.log").read_text()
    assert reply.lease_id[:8] in log
    assert "12345678" not in re.sub(r"^.*evil.*$", "", log, flags=re.MULTILINE)
    assert all(line.isprintable() for line in log.splitlines())
    assert shown.label.isprintable()
    assert shown.kernel_id.isprintable()


def test_what_lies_about_is_for_its_owner_only(world: World) -> None:
    world.start_broker()
    with world.client() as client:
        client.create_lease(LeaseRequest(fraction_milli=250))
    run_folder = Path(world.socket).parent
    open_to_others = [
        path
        for path in [run_folder, *run_folder.iterdir()]
        if path.lstat().st_mode & 0o077 and path.lstat().st_uid == os.getuid()
    ]
    assert open_to_others == []
