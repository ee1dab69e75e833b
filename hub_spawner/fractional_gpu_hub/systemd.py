"""Servers as systemd units, on top of `jupyterhub-systemdspawner`.

A unit with a private temporary folder still sees `/run`, with the broker's socket and the seat's file. A unit with a dynamic user gets the
file as a credential, because systemd chooses the uid only when the unit starts.
"""

from pathlib import Path
from typing import Any

from systemdspawner import SystemdSpawner
from traitlets import default

from fractional_gpu_hub.mixin import FractionalGPUMixin, ids_of_user
from fractional_gpu_hub.seats import spawn_error

_CREDENTIAL = "gpu-seat"


class FractionalGPUSystemdSpawner(FractionalGPUMixin, SystemdSpawner):  # type: ignore[misc] # untyped
    """Servers in separate units, each with the uid of its user. The hub runs as root."""

    unit_extra_properties: Any

    @default("isolate_devices")
    def _gpu_isolate_devices_default(self) -> bool:
        return False  # PrivateDevices would hide the GPUs

    def gpu_user_ids(self) -> tuple[int, int] | None:
        """Return the ids of the unit's user; None for a dynamic user, who gets the file as a credential."""
        if self.dynamic_users:
            return None
        return ids_of_user(self._expand_user_vars(self.username_template))

    def gpu_seat_uid(self) -> int | None:
        """Return the uid that may use the seat. None for a dynamic user, whose uid is unknown yet: any process with the token may."""
        ids = self.gpu_user_ids()
        return None if ids is None else ids[0]

    def gpu_seat_path(self, file: Path) -> str:
        """Return the file's path, or the path of a dynamic user's credential."""
        return f"/run/credentials/{self.unit_name}.service/{_CREDENTIAL}" if self.dynamic_users else str(file)

    async def start(self) -> object:
        """Take a seat and start the unit."""
        if self.isolate_devices:
            raise spawn_error(
                "c.SystemdSpawner.isolate_devices is True, which hides every GPU from the server; set it to False",
                reason="configuration",
            )
        # The unit takes one value for the property: systemdspawner expands the user's name in strings only, not in lists.
        credential = self.unit_extra_properties.get("LoadCredential", "")
        if self.dynamic_users and credential and not str(credential).startswith(f"{_CREDENTIAL}:"):
            raise spawn_error(
                f"c.SystemdSpawner.unit_extra_properties has LoadCredential={credential!r}, but with dynamic_users=True, the seat "
                "needs that property; pass your credential in a file that the unit can read, or set dynamic_users to False",
                reason="configuration",
            )
        return await super().start()

    async def gpu_prepare(self) -> None:
        """Hand the file to a dynamic user as a credential."""
        if self.dynamic_users and self._gpu_seat is not None:
            properties = {**self.unit_extra_properties, "LoadCredential": f"{_CREDENTIAL}:{self._gpu_seat['file']}"}
            self.unit_extra_properties = properties
