"""Ready spawners for servers that are processes of this machine."""

from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner

from fractional_gpu_hub.mixin import FractionalGPUMixin, ids_of_user


class FractionalGPULocalSpawner(FractionalGPUMixin, LocalProcessSpawner):  # type: ignore[misc] # untyped
    """Servers of the system's users, whose uids keep them from each other's leases. The hub runs as root."""

    def gpu_user_ids(self) -> tuple[int, int]:
        """Return the ids of the system's user."""
        return ids_of_user(self.user.name)


class FractionalGPUSimpleSpawner(FractionalGPUMixin, SimpleLocalProcessSpawner):  # type: ignore[misc] # untyped
    """Servers that all run as the hub's user, for trying out. This prevents mistakes, but not attacks."""
