"""Ready spawners for servers that are processes of this machine."""

import pwd

from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner

from fractional_gpu_hub.mixin import FractionalGPUMixin


class FractionalGPULocalSpawner(FractionalGPUMixin, LocalProcessSpawner):  # type: ignore[misc] # untyped
    """Servers of the system's users, each with a uid of its own, which keeps users from each other's leases. The hub runs as root."""

    def gpu_user_ids(self) -> tuple[int, int]:
        """Return the ids of the system's user."""
        user = pwd.getpwnam(self.user.name)
        return user.pw_uid, user.pw_gid


class FractionalGPUSimpleSpawner(FractionalGPUMixin, SimpleLocalProcessSpawner):  # type: ignore[misc] # untyped
    """Servers that all run as the hub's own user: for trying out. Mistakes are prevented, attacks are not."""
