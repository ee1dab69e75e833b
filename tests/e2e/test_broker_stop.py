"""`jupyter gpu broker --stop` and `--restart`: healthy, stopped and hung brokers, one without a socket, and another user's."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fractional_gpu.commands import broker
from fractional_gpu.commands.broker import find_broker
from fractional_gpu.commands.main import main
from fractional_gpu.commands.terminal.text import CommandError
from tests.support.stopping import stop
from tests.support.stories import CHECK, fill
from tests.support.victims import brokers
from tests.support.world import Notebook, Server, World

pytestmark = pytest.mark.promise("broker-restart")


def ended(world: World, *words: str, code: int = 0) -> dict[str, Any]:
    # What broker.json does not contain must come from the running broker: none of it is in this environment.
    with patch.dict(world.environment):
        del world.environment["JUPYTER_GPU_SIMULATE"]
        done = world.command("broker", *words, "--json")
    assert done.returncode == code, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_stopped_broker_leaves_its_kernels_and_the_next_cell_starts_another(world: World, server: Server) -> None:
    (name,) = world.install(1000)
    suspended, resident = server.start(name), server.start(name)
    suspended.must(fill(1))
    resident.must(fill(2))
    world.await_state(suspended.kernel_id, "suspended")
    pid = world.broker_pid()
    told = ended(world, "--stop")
    assert told == {
        "socket": world.socket,
        "pid": pid,
        "how": "orderly",
        "resident": 1,
        "suspended": 1,
        "waiting": 0,
        "restarted": None,
    }
    assert brokers(world) == []
    assert resident.must(CHECK).text == "intact\n"
    assert brokers(world) == [], "a resident kernel needs none"
    assert suspended.must(CHECK).text == "intact\n"
    assert world.status().simulated
    assert ended(world, "--stop")["pid"] is not None
    assert ended(world, "--stop") == {
        **told,
        "pid": None,
        "how": "none",
        "resident": None,
        "suspended": None,
        "waiting": None,
    }
    assert resident.must(CHECK).text == "intact\n"
    a_restarted_broker_has_the_options_that_it_had_even_if_its_files_are_gone(world, resident)
    a_broker_whose_configuration_was_broken_meanwhile_is_not_stopped(world)


def a_broker_whose_configuration_was_broken_meanwhile_is_not_stopped(world: World) -> None:
    pid = world.broker_pid()
    world.configure("c.GPUBroker.host_memory = 'much'\n")
    done = world.command("broker", "--restart")
    assert done.returncode == 1
    assert "the broker was not stopped, because it would not start again: " in done.stderr
    assert "host_memory" in done.stderr
    assert world.broker_pid() == pid


def a_restarted_broker_has_the_options_that_it_had_even_if_its_files_are_gone(world: World, notebook: Notebook) -> None:
    for gone in ((), ("broker.sock", "broker.sock.lock", "broker.json")):
        pid = world.broker_pid()
        for file in gone:
            Path(world.socket).with_name(file).unlink()
        told = ended(world, "--restart")
        assert (told["pid"], told["how"]) == (pid, "orderly"), gone
        assert told["restarted"] == world.broker_pid() != pid, gone
        assert world.status().simulated
        assert notebook.must(CHECK).text == "intact\n"
        assert world.lease(notebook.kernel_id).state == "resident", gone


def test_a_broker_of_another_user_is_not_touched_a_stopped_one_ends_in_order_and_one_that_does_not_end_is_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start_broker()
    pid = world.broker_pid()
    assert pid is not None
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 4711)
        with pytest.raises(CommandError, match=rf"\(process {pid}\) belongs to another user"):
            broker.run_stop(argparse.Namespace(socket=world.socket, restart=True, json=False))
    assert world.broker_pid() == pid

    stop(pid)
    told = ended(world, "--restart")
    assert (told["pid"], told["how"], told["resident"]) == (pid, "orderly", None)
    assert pid not in brokers(world)

    pid = world.broker_pid()
    assert pid is not None
    monkeypatch.setattr(broker, "ORDERLY_S", 0.0)
    assert broker.end_process(pid) == "killed"
    assert broker.end_process(pid) == "orderly", "it has ended already"
    assert pid not in brokers(world)
    assert find_broker(world.socket) is None


def test_a_system_service_is_left_to_systemctl(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broker", "--stop", "--socket", "/run/jupyter-gpu-nowhere/broker.sock"]) == 1
    assert "systemctl stop jupyter-gpu" in capsys.readouterr().err


def test_who_rescues_kernels_is_no_broker(tmp_path: Path) -> None:
    socket = tmp_path / "broker.sock"
    program = (
        "import sys; from fractional_gpu.client.http import claim_address; from fractional_gpu.host.claims import NameClaim;"
        "claim = NameClaim.take(claim_address(sys.argv[2])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "rescue", str(socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert find_broker(str(socket)) == process.pid
        with pytest.raises(CommandError, match="is not a broker"):
            broker.run_stop(argparse.Namespace(socket=str(socket), restart=False, json=False))
        assert process.poll() is None
        process.communicate()


def test_what_does_not_go_together_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broker", "--restart", "--simulate", "1x1GiB", "--detach"]) == 2
    assert "--simulate, --detach" in capsys.readouterr().err
    assert main(["broker", "--json"]) == 2
    assert "--json can only be used with --stop or --restart" in capsys.readouterr().err
