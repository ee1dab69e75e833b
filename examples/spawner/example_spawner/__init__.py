"""An example of a spawner: copy it, and put your own in the place of JupyterHub's simple one.

The mixin comes first. It shows the choice on the spawn page, takes a seat before `start`, keeps it over restarts of the hub, and gives it
back. What it cannot know are three things, each a method to override.
"""

from pathlib import Path

from fractional_gpu_hub.mixin import FractionalGPUMixin
from jupyterhub.spawner import SimpleLocalProcessSpawner


class ExampleSpawner(FractionalGPUMixin, SimpleLocalProcessSpawner):
    """Servers as processes of the hub's user, at a low priority."""

    def gpu_user_ids(self) -> tuple[int, int] | None:
        """Return the uid and gid of the server: only they may use the seat. None: they are not known before it runs."""
        return super().gpu_user_ids()

    def gpu_seat_path(self, file: Path) -> str:
        """Return where the server sees the seat's file: in a container, for instance, where it is mounted."""
        return super().gpu_seat_path(file)

    def gpu_socket_path(self) -> str:
        """Return where the server sees the broker's socket."""
        return super().gpu_socket_path()

    async def start(self) -> object:
        """Start the server. The seat has been taken, and `get_env` has its variables, when the next class's `start` is called."""
        self.cmd = ["nice", *self.cmd]
        return await super().start()
