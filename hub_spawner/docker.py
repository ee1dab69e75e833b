"""Servers as Docker containers of this machine: the ready combination with `dockerspawner`, which is installed beside this package.

- Each user's containers run with a uid of their own (`gpu_first_uid` and the hub's number of the user): uids are what keeps users
  from each other's leases, and root in a container that shares the machine's processes would be the machine's administrator.
- The broker must see the kernels' processes and hear them on the loopback interface: the containers share the machine's processes
  and network (`pid_mode`, `network_mode`), as servers without containers do. Files are their own.
- Into a container go the broker's socket, the seat's file (read-only) and the GPUs; on the simulated ones, their folder.
"""

from pathlib import Path
from typing import Any

from dockerspawner import DockerSpawner
from traitlets import Int, Unicode, default

from hub_spawner.errors import spawn_error
from hub_spawner.mixin import FractionalGPUMixin

__all__ = ["FractionalGPUDockerSpawner"]

_SEAT = "/run/secrets/jupyter-gpu-seat.json"
_USERS = 100  # the group of that name, as in Jupyter's own images


class FractionalGPUDockerSpawner(FractionalGPUMixin, DockerSpawner):  # type: ignore[misc] # untyped
    """Servers in containers, each user with a uid of their own. The hub runs as root, and its images have this package."""

    extra_create_kwargs: Any
    extra_host_config: Any
    read_only_volumes: Any

    gpu_first_uid: Int[int, int] = Int(
        200_000,
        config=True,
        min=1000,
        max=2**31 - 2**24,
        help="""The users' containers run with this uid plus the hub's number of the user: choose a range that nobody else has.

        Example: c.FractionalGPUDockerSpawner.gpu_first_uid = 500000
        """,
    )
    gpu_device_request: Unicode[str, str | bytes] = Unicode(
        "nvidia",
        config=True,
        help="""The container runtime's driver for GPUs; empty: no GPU is passed in (simulated ones need none).

        Example: c.FractionalGPUDockerSpawner.gpu_device_request = ""
        """,
    )

    @default("network_name")
    def _gpu_network_name_default(self) -> str:
        return "host"

    def gpu_user_ids(self) -> tuple[int, int]:
        """Return the ids of this user's containers."""
        return self.gpu_first_uid + int(self.user.id), _USERS

    def gpu_seat_path(self, file: Path) -> str:
        """Return the file's path in the container."""
        del file
        return _SEAT

    async def start(self) -> Any:  # noqa: ANN401 - DockerSpawner's
        """Take a seat and start the container."""
        user = self.extra_create_kwargs.get("user") if isinstance(self.extra_create_kwargs, dict) else None
        if user is not None and str(user).partition(":")[0] in {"", "0", "root"}:
            raise spawn_error(
                "c.DockerSpawner.extra_create_kwargs has user 0, which would be an administrator of the GPU broker; leave user "
                "out",
                reason="configuration",
            )
        return await super().start()

    async def gpu_prepare(self) -> None:
        """Give the container its uid, the socket, the seat and the GPUs."""
        uid, gid = self.gpu_user_ids()
        self.extra_create_kwargs = {"user": f"{uid}:{gid}", **self.extra_create_kwargs}
        folder = str(Path(self.gpu_socket).parent)
        binds = {source: target for source, target in self.read_only_volumes.items() if target != _SEAT}
        binds[folder] = folder
        if self._gpu_seat is not None:
            binds[self._gpu_seat["file"]] = _SEAT
        self.read_only_volumes = binds
        host: dict[str, Any] = {"pid_mode": "host", "network_mode": "host", **self.extra_host_config}
        if self._gpu_seat is not None and self.gpu_device_request:
            from docker.types import DeviceRequest  # noqa: PLC0415 - comes with dockerspawner

            request = DeviceRequest(driver=self.gpu_device_request, count=-1, capabilities=[["gpu"]])
            host.setdefault("device_requests", [request])
        self.extra_host_config = host
