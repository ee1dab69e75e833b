"""Runs servers as systemd units, based on `jupyterhub-systemdspawner`.

A unit with a private temporary folder can still see `/run`, which contains the broker's socket and the seat file. A unit with a dynamic
user gets the seat file as a credential, because systemd does not choose the uid until the unit starts.
"""

from pathlib import Path
from typing import Any

from systemdspawner import SystemdSpawner
from traitlets import default

from fractional_gpu_hub.mixin import FractionalGPUMixin, ids_of_user
from fractional_gpu_hub.seats import spawn_error

_CREDENTIAL = "gpu-seat"


class FractionalGPUSystemdSpawner(FractionalGPUMixin, SystemdSpawner):  # type: ignore[misc] # untyped
    """Starts each server in its own unit, under its user's uid. The hub must run as root."""

    unit_extra_properties: Any

    @default("isolate_devices")
    def _gpu_isolate_devices_default(self) -> bool:
        return False  # PrivateDevices would hide the GPUs

    def gpu_user_ids(self) -> tuple[int, int] | None:
        """Return the uid and gid of the unit's user, or None for a dynamic user, who gets the seat file as a credential."""
        if self.dynamic_users:
            return None
        return ids_of_user(self._expand_user_vars(self.username_template))

    def gpu_seat_uid(self) -> int | None:
        """Return the only uid that may use the seat. For a dynamic user, who has no uid yet and only needs the token, return None."""
        ids = self.gpu_user_ids()
        return None if ids is None else ids[0]

    def gpu_seat_path(self, file: Path) -> str:
        """Return the path of the seat file, or of the credential for a dynamic user."""
        return f"/run/credentials/{self.unit_name}.service/{_CREDENTIAL}" if self.dynamic_users else str(file)

    async def start(self) -> object:
        """Request a seat, then start the unit."""
        if self.isolate_devices:
            raise spawn_error(
                "c.SystemdSpawner.isolate_devices is True, which hides every GPU from the server; set it to False",
                reason="configuration",
            )
        # Use one value for the property, because systemdspawner expands the user's name only in strings, not in lists.
        credential = self.unit_extra_properties.get("LoadCredential", "")
        if self.dynamic_users and credential and not str(credential).startswith(f"{_CREDENTIAL}:"):
            raise spawn_error(
                f"c.SystemdSpawner.unit_extra_properties has LoadCredential={credential!r}, but with dynamic_users=True, the seat "
                "needs that property; pass your credential in a file that the unit can read, or set dynamic_users to False",
                reason="configuration",
            )
        return await super().start()

    async def gpu_prepare(self) -> None:
        """If the user is dynamic, pass the seat file as a credential."""
        if self.dynamic_users and self._gpu_seat is not None:
            properties = {**self.unit_extra_properties, "LoadCredential": f"{_CREDENTIAL}:{self._gpu_seat['file']}"}
            self.unit_extra_properties = properties
