"""The example of a teaching lab is a working configuration and does what its guide says."""

import csv
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from fractional_gpu.client.discovery import SYSTEM_SOCKET
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.config import load
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.protocol.messages import ProgressKind
from fractional_gpu.protocol.seats import SeatRequest
from tests.broker.live import live_broker
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "jupyterhub"
SHARED = {"devices", "hours", "may_move"}  # facts about the machine and the clock, not the lesson


def test_its_pools_are_understood() -> None:
    settings = load(EXAMPLE / "jupyter_gpu_config.py")
    devices = [DeviceSpec(device_id=f"GPU-{number}", name="H", memory_mib=81_559) for number in range(2)]
    (pool,) = settings.pool_specs(devices)
    assert pool.devices == ("GPU-0", "GPU-1")
    assert pool.may_move
    assert pool.user_limits.milli == 250
    (configured,) = settings.pools
    assert configured.groups is not None
    assert set(configured.groups) == {"students", "teachers"}


def test_its_hub_runs_the_broker_with_these_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLE / "jupyterhub_config.py").read_text()
    assert "/etc/jupyter/jupyter_gpu_config.py" in text
    c = Config()
    here = text.replace("/etc/jupyter/jupyter_gpu_config.py", str(EXAMPLE / "jupyter_gpu_config.py"))
    monkeypatch.setattr("fractional_gpu_hub.configuration._is_root", lambda: True)
    monkeypatch.setattr("fractional_gpu_hub.configuration._answers", lambda _: False)
    exec(compile(here, "jupyterhub_config.py", "exec"), {"get_config": lambda: c})  # noqa: S102 - as the hub does
    broker, culler, page = c.JupyterHub.services.get_value([])
    assert broker["name"] == "gpu-broker"
    assert broker["command"][-2:] == ["--config", str(EXAMPLE / "jupyter_gpu_config.py")]
    assert culler["name"] == "idle-culler"
    assert page["command"][-2:] == ["--socket", SYSTEM_SOCKET]
    roles = [role["name"] for role in c.JupyterHub.load_roles]
    assert roles[:2] == ["idle-culler", "gpu-admin"]
    assert roles[2:] in ([], ["user"]), "JupyterHub 5 takes what all users may in that role"
    assert c.JupyterHub.spawner_class == "fractional-gpu-local"


def test_a_whole_class_has_seats_on_the_first_day() -> None:
    """Half of the class on one of the two devices, which represents both."""
    pools: dict[str, Any] = runpy.run_path(str(EXAMPLE / "jupyter_gpu_config.py"), {"get_config": _config})[
        "c"
    ].GPUBroker.pools
    policy = {key: value for key, value in pools["default"].items() if key not in SHARED}
    with live_broker(pools={"default": policy}, seats_required=True) as live, SeatClient(live.socket) as client:
        for number in range(30):
            request = SeatRequest(owner=f"student{number}", pool="default", fraction_milli=125, groups=["students"])
            assert list(client.take_seat(request))[-1].kind == ProgressKind.GRANTED, number
        teacher = SeatRequest(owner="grace", pool="default", fraction_milli=250, groups=["teachers", "staff"])
        assert list(client.take_seat(teacher))[-1].priority == 10


def _config() -> Any:  # noqa: ANN401 - traitlets' own
    return Config()


def test_its_lesson_can_be_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lesson.py", "60", "lesson"])
    runpy.run_path(str(EXAMPLE / "lesson.py"), run_name="__main__")
    with (tmp_path / "lesson-cells.csv").open() as cells:
        rows = list(csv.DictReader(cells))
    assert len({row["user"] for row in rows}) == 60
    assert len(rows) > 600
