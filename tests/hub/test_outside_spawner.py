"""A spawner that another package registers can be configured by name, and its servers have seats."""

import os
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from traitlets.config import Config

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.config import ConfigError
from fractional_gpu.host.process import PROC
from fractional_gpu_hub import configure
from tests.broker.live import live_broker
from tests.hub.test_engines import made
from tests.support.outside import as_installed


async def test_its_server_has_the_seat_that_was_chosen(tmp_path: Path, open_folder: Path) -> None:
    config = Config()
    with as_installed("spawner", tmp_path / "site"), live_broker(seats_required=True) as live:
        configure(config, spawner="example-fractional-gpu", socket=str(open_folder / "broker.sock"))
        assert config.JupyterHub.spawner_class == "example-fractional-gpu"
        (point,) = entry_points(group="jupyterhub.spawners", name=config.JupyterHub.spawner_class)
        spawner = made(live, point.load(), home_dir_template=str(tmp_path / "{username}"))
        spawner.cmd = ["sleep", "600"]
        spawner.args = []
        spawner.get_args = list
        await spawner.start()
        try:
            words = (PROC / str(spawner.pid) / "environ").read_bytes().split(b"\0")
            environment = dict(word.decode().split("=", 1) for word in words if word)
            assert environment["JUPYTER_GPU_SOCKET"] == live.socket
            assert os.path.exists(environment["JUPYTER_GPU_SEAT_FILE"])  # noqa: ASYNC240, PTH110 - of this machine, at once
            with SeatClient(live.socket) as client:
                (seat,) = client.seats().seats
            assert (seat.pool, seat.fraction_milli) == ("default", 250)
        finally:
            await spawner.stop(now=True)


def test_one_whose_package_is_broken_stops_the_hub_with_the_reason(tmp_path: Path) -> None:
    with as_installed("spawner", tmp_path / "site"):
        (entries,) = (tmp_path / "site").glob("*/entry_points.txt")
        entries.write_text(entries.read_text().replace("example_spawner", "no_such_package"))
        with pytest.raises(ConfigError, match=r"no_such_package:ExampleSpawner could not be imported: No module named"):
            configure(Config(), spawner="example-fractional-gpu", socket=str(tmp_path / "broker.sock"))
