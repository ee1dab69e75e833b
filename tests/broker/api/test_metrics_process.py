"""A broker process serves its metrics over TCP if configured to, and releases the port when it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BrokerUnavailableError
from tests.support.ports import free_port
from tests.support.world import DEADLINE_S, until


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="jfg-") as name:
        yield Path(name)


def serves(socket: str) -> bool:
    with suppress(BrokerUnavailableError), BrokerClient(socket) as client:
        return client.ping().simulated
    return False


def test_a_broker_serves_its_metrics_by_tcp_and_lets_go_of_the_port(folder: Path) -> None:
    socket, port = str(folder / "broker.sock"), free_port()
    settings = {"metrics_address": f"127.0.0.1:{port}", "idle_exit": "never"}
    argv = [sys.executable, "-m", "fractional_gpu.commands.main", "broker", "--socket", socket, "--simulate", "1x64MiB"]
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(folder / "config"), "XDG_STATE_HOME": str(folder / "state")}
    with (folder / "log").open("wb") as log:
        broker = subprocess.Popen([*argv, "--settings", json.dumps(settings)], stderr=log, env=environment)
    try:
        until(lambda: serves(socket), "the broker serves")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as reply:
            text = reply.read().decode()
        assert 'jupyter_gpu_build_info{simulated="true"' in text
        assert "process_resident_memory_bytes " in text
        assert list((folder / "state").rglob("audit.jsonl")), "it looked whether it can write its audit log"
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(DEADLINE_S) == 0, (folder / "log").read_text()
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S)
    finally:
        broker.kill()
        broker.wait()
