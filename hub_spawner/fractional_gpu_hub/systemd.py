"""Servers as systemd units: the ready combination with `jupyterhub-systemdspawner`, which is installed beside this package.

The broker's socket and the seat's file must be where the unit sees them: a unit with a temporary folder of its own does see `/run`.
A unit with a dynamic user gets the file as a credential, because systemd chooses the uid only as the unit starts.
"""

from pathlib import Path
from typing import Any

from systemdspawner import SystemdSpawner
from traitlets import default

from fractional_gpu_hub.mixin import FractionalGPUMixin, ids_of_user
from fractional_gpu_hub.seats import spawn_error

_CREDENTIAL = "gpu-seat"


class FractionalGPUSystemdSpawner(FractionalGPUMixin, SystemdSpawner):  # type: ignore[misc] # untyped
    """Servers in units of their own, each with the uid of its user. The hub runs as root."""

    unit_extra_properties: Any

    @default("isolate_devices")
    def _gpu_isolate_devices_default(self) -> bool:
        return False  # with PrivateDevices there is no GPU in the unit

    def gpu_user_ids(self) -> tuple[int, int] | None:
        """Return the ids of the unit's user; None for a dynamic user, which reads the file as a credential of root's."""
        if self.dynamic_users:
            return None
        return ids_of_user(self._expand_user_vars(self.username_template))

    def gpu_seat_uid(self) -> int | None:
        """Return the uid that may draw on the seat; None for a dynamic user, whose uid is not known yet: any process with the token may."""
        ids = self.gpu_user_ids()
        return None if ids is None else ids[0]

    def gpu_seat_path(self, file: Path) -> str:
        """Return the file's path, for a dynamic user that of its credential."""
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
                f"c.SystemdSpawner.unit_extra_properties has LoadCredential={credential!r}, and with dynamic_users=True the seat needs "
                "that property; hand your credential over as a file that the unit can read, or set dynamic_users to False",
                reason="configuration",
            )
        return await super().start()

    async def gpu_prepare(self) -> None:
        """Hand the file over as a credential where the unit's user is dynamic."""
        if self.dynamic_users and self._gpu_seat is not None:
            properties = {**self.unit_extra_properties, "LoadCredential": f"{_CREDENTIAL}:{self._gpu_seat['file']}"}
            self.unit_extra_properties = properties
