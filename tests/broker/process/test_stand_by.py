"""A service's broker waits while another one serves, takes over when that ends, and uses its own settings."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fractional_gpu.commands.main import main
from tests.support.world import World, new_world, until

SETTINGS = {"pools": {"default": {"fractions": ["1/2"]}}, "idle_exit": "never"}


@pytest.fixture
def world() -> Iterator[World]:
    with new_world() as made:
        yield made


def stand_by(world: World, settings: str) -> subprocess.Popen[bytes]:
    log = (world.folder / "service.err").open("wb")
    command = [
        sys.executable,
        "-P",
        "-m",
        "fractional_gpu.commands.main",
        "broker",
        "--socket",
        world.socket,
        "--stand-by",
    ]
    with log:
        return subprocess.Popen([*command, "--settings", settings], env=world.environment, stderr=log)


def test_it_takes_over_when_the_other_broker_ends(world: World) -> None:
    world.start_broker()
    first = world.broker_pid()
    service = stand_by(world, json.dumps(SETTINGS))
    try:
        lock = f"{world.socket}.lock"
        until(lambda: _has_open(service.pid, lock), "the second broker waits for the lock")
        assert world.broker_pid() == first
        world.kill_broker()
        until(lambda: world.broker_pid() == service.pid, "the second broker serves")
        assert world.status().pools == {"default": [500]}
        restart = json.loads(Path(world.socket).with_name("broker.json").read_text())
        argument = json.loads(restart["argv"][-1])
        assert json.loads(argument["settings"]) == SETTINGS
        assert not argument["stand_by"], "the user who restarts it wants to know at once that it serves"
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("{", "--settings is not JSON"),
        ("[]", "--settings must be a JSON object"),
        ('{"pools": {"default": {"idle_afetr": 1}}}', "did you mean 'idle_after'?"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    world: World,
    settings: str,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        resource, "setrlimit", lambda _kind, _limits: None
    )  # this process keeps its own limit of open files
    assert main(["broker", "--socket", world.socket, "--stand-by", "--settings", settings]) == 1
    assert complaint in capsys.readouterr().err


def _has_open(pid: int, path: str) -> bool:
    return any(link.resolve() == Path(path) for link in Path(f"/proc/{pid}/fd").iterdir())
