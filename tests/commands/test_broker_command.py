"""`jupyter gpu broker`: its command line."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.broker.process import app
from fractional_gpu.broker.process.restarting import BrokerOptions
from fractional_gpu.commands import broker
from fractional_gpu.commands.broker import Stopped, _render
from fractional_gpu.commands.main import main
from fractional_gpu.config import load
from tests.broker.live import live_broker
from tests.support.paths import ROOT


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[BrokerOptions]:
    """What the broker was started with, in this process or in a separate one."""
    options: list[BrokerOptions] = []

    def run_broker(given: BrokerOptions) -> int:
        assert not given.detach
        options.append(given)
        return 3

    def start_detached(given: BrokerOptions) -> int:
        assert given.detach
        options.append(given)
        return 4

    monkeypatch.setattr(app, "run_broker", run_broker)
    monkeypatch.setattr(broker, "start_detached", start_detached)
    return options


def test_every_option_reaches_the_broker_and_its_answer_is_the_exit_code(ran: list[BrokerOptions]) -> None:
    arguments = ["--socket", "/s", "--config", "/c.py", "--simulate", "2x80GiB", "--detach", "--idle-exit", "10m"]
    assert main(["broker", *arguments, "--state-dir", "/d", "--log-level", "debug"]) == 4
    wanted = BrokerOptions(
        socket="/s",
        config_file="/c.py",
        simulate="2x80GiB",
        detach=True,
        idle_exit="10m",
        state_dir="/d",
        log_level="DEBUG",
    )
    assert ran == [wanted]


def test_in_the_background_it_says_that_a_broker_which_serves_already_keeps_its_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(broker, "start_detached", lambda _given: 0)
    with live_broker() as live:
        socket = str(live.socket)
        assert main(["broker", "--detach", "--socket", socket, "--idle-exit", "1m"]) == 0
        said = capsys.readouterr().err
        assert f"a broker (process {os.getpid()}) is already running on {socket} and keeps its options" in said
        assert f"`jupyter gpu broker --stop --socket {socket}`" in said
        assert main(["broker", "--detach", "--socket", socket]) == 0
        assert capsys.readouterr().err == ""
    assert main(["broker", "--detach", "--socket", socket, "--idle-exit", "1m"]) == 0
    assert capsys.readouterr().err == ""


def test_the_generated_configuration_can_be_used_as_it_is(
    tmp_path: Path, ran: list[BrokerOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["broker", "--generate-config"]) == 0
    file = tmp_path / "jupyter_gpu_config.py"
    file.write_text(capsys.readouterr().out)
    assert load(file).files == (file,)
    assert ran == []


def test_a_stop_tells_of_kernels_only_where_there_are_some() -> None:
    done = Stopped(socket="/run/b.sock", pid=7, how="orderly", resident=0, suspended=0, waiting=0, restarted=None)
    assert "keep running" not in "\n".join(_render(done))
    assert "No kernel had GPU memory, live or saved" in "\n".join(_render(done))
    assert "The kernels keep running (1 resident, 0 suspended)" in "\n".join(_render(replace(done, resident=1)))
    assert "The kernels keep running. " in "\n".join(_render(replace(done, resident=None, suspended=None)))


def test_the_unit_runs_a_service_with_options_that_there_are(ran: list[BrokerOptions]) -> None:
    unit = (ROOT / "provisioner" / "fractional_gpu" / "config" / "service" / "jupyter-gpu.service").read_text(
        encoding="utf-8"
    )
    (start,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    program, *words = start.removeprefix("ExecStart=").split()
    assert program.endswith("/bin/jupyter-gpu")
    assert main(words) == 3
    (options,) = ran
    assert options.service
    assert (options.detach, options.idle_exit, options.state_dir) == (False, None, "/var/lib/jupyter-gpu")
