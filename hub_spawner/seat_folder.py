"""The folder of the servers' seat files: created where it is missing, and otherwise left as its administrator set it up."""

import stat
from pathlib import Path

from hub_spawner.errors import spawn_error

__all__ = ["prepare_seat_folder"]


def prepare_seat_folder(folder: Path, *, shared: bool) -> None:
    """Create the folder if it does not exist. `shared`: users with a uid of their own pass through it to their file.

    The mode of a folder that exists is never changed. Raises OSError, and the error that stops the spawn where users cannot pass
    through.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if shared and not mode & stat.S_IXOTH:
            raise spawn_error(
                f"users cannot pass through the hub's folder of seat files, {folder} (mode {mode:04o}); ask your administrator "
                f"to run `chmod o+x {folder}`, or to set c.FractionalGPUMixin.gpu_seat_dir to another folder",
                reason="seat-file",
            ) from None
    else:
        folder.chmod(0o711)  # pass through, not list; `mkdir` alone is subject to the umask
