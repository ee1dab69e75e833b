"""Runs servers as Docker containers on this machine, based on `dockerspawner`.

- Each user's containers run under a separate uid (`gpu_first_uid` plus the user's id in the hub), so users cannot access each other's
  leases. The broker treats root in a container as root on the machine.
- The broker runs as root on the machine, identifies kernels by their host pids, and connects to them on the container's loopback interface.
- Each container has access to the GPUs, and read-only access to the broker's socket and the seat file.
- A container is removed when its server stops, because a reused container would still have the environment of an earlier seat.
"""

import inspect
from pathlib import Path
from typing import Any

from dockerspawner import DockerSpawner
from jupyterhub.utils import random_port
from traitlets import Int, Unicode, default

from fractional_gpu_hub.mixin import FractionalGPUMixin
from fractional_gpu_hub.seats import spawn_error

_SEAT = "/run/secrets/jupyter-gpu-seat.json"
_USERS = 100  # the id of the group `users` in Jupyter's own images


class FractionalGPUDockerSpawner(FractionalGPUMixin, DockerSpawner):  # type: ignore[misc] # untyped
    """Runs servers in containers, with a separate uid for each user. The hub must run as root, and the images must include this package."""

    extra_create_kwargs: Any
    extra_host_config: Any
    read_only_volumes: Any
    host_ip: str
    network_name: str
    port: int

    gpu_first_uid: Int[int, int] = Int(
        200_000,
        config=True,
        min=1000,
        max=2**31 - 2**24,
        help="""Each user's container runs as this uid plus the user's id in the hub. Choose a range that
        does not include the uid of any other user of the machine.

        Example: c.FractionalGPUDockerSpawner.gpu_first_uid = 500000
        """,
    )
    gpu_device_request: Unicode[str, str | bytes] = Unicode(
        "nvidia",
        config=True,
        help="""The container runtime's GPU driver. Leave it empty to pass no GPU to containers.

        Example: c.FractionalGPUDockerSpawner.gpu_device_request = ""
        """,
    )

    @default("remove")
    def _gpu_remove_default(self) -> bool:
        return True

    def gpu_user_ids(self) -> tuple[int, int]:
        """Return the uid and gid of this user's containers."""
        return self.gpu_first_uid + int(self.user.id), _USERS

    def gpu_seat_path(self, file: Path) -> str:
        """Return the path of the seat file inside the container."""
        del file
        return _SEAT

    async def gpu_prepare(self) -> None:
        """Set up the container's uid, socket, seat file and GPUs. Raises an HTTPError, which stops the spawn."""
        create, host = await self._evaluated(self.extra_create_kwargs), await self._evaluated(self.extra_host_config)
        uid, gid = self.gpu_user_ids()
        user = str(create.get("user", uid)).partition(":")[0]
        if user in {"", "0", "root"} or host.get("privileged"):
            raise spawn_error(
                "this hub's Docker settings run containers as root or in privileged mode, which would make every user an "
                "administrator of the GPU broker; leave user and privileged out of extra_create_kwargs and extra_host_config",
                reason="configuration",
            )
        if self._gpu_seat is not None and user != str(uid):
            raise spawn_error(
                f"this hub's Docker settings make containers run as the user {user[:80]!r}, but this server's seat belongs to uid "
                f"{uid}; leave user out of extra_create_kwargs, and set the users' uids with gpu_first_uid",
                reason="configuration",
            )
        self.extra_create_kwargs = {"user": f"{uid}:{gid}", **create}
        folder = str(Path(self.gpu_socket).parent)
        binds = {source: target for source, target in self.read_only_volumes.items() if target != _SEAT}
        binds[folder] = folder
        if self._gpu_seat is not None:
            binds[self._gpu_seat["file"]] = _SEAT
            if self.gpu_device_request:
                request = {"Driver": self.gpu_device_request, "Count": -1, "Capabilities": [["gpu"]]}
                host.setdefault("device_requests", [request])
        self.read_only_volumes = binds
        self.extra_host_config = host
        if self._shares_network():
            self.port = random_port()  # all containers share the machine's ports, as the administrator has chosen

    def _shares_network(self) -> bool:
        """Return whether containers use the host's network. Call this only after the settings have been evaluated."""
        return bool(self.extra_host_config.get("network_mode", self.network_name) == "host")

    async def _evaluated(self, value: Any) -> dict[str, Any]:  # noqa: ANN401 - a dictionary, or a callable that returns one
        found = value(self) if callable(value) else value
        return dict(await found if inspect.isawaitable(found) else found)

    async def get_ip_and_port(self) -> tuple[str, int]:
        """Return the address and port on which the server listens."""
        if self._shares_network():
            return self.host_ip, self.port
        found: tuple[str, int] = await super().get_ip_and_port()
        return found
