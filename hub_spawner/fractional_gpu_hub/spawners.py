"""Ready-made spawners for servers that run as processes on this machine."""

from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner

from fractional_gpu_hub.mixin import FractionalGPUMixin, ids_of_user


class FractionalGPULocalSpawner(FractionalGPUMixin, LocalProcessSpawner):  # type: ignore[misc] # untyped
    """Starts servers as system users, so that users cannot access each other's leases. The hub must run as root."""

    def gpu_user_ids(self) -> tuple[int, int]:
        """Return the uid and gid of the system user."""
        return ids_of_user(self.user.name)


class FractionalGPUSimpleSpawner(FractionalGPUMixin, SimpleLocalProcessSpawner):  # type: ignore[misc] # untyped
    """Starts all servers as the hub's own user, for trials. Users are protected from each other's mistakes, but not from attacks."""
