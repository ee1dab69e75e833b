"""Finds where control group hierarchies are mounted and which paths their groups have on the host, even inside a control group namespace.

In such a namespace, a container sees each level above its own group as `/..`. For example, another pod's group is `/../../podUID/...`. The
names of the levels above are hidden. If the whole hierarchy is mounted here as well, we search it once for the folder with our own group's
inode. From that folder's path, we can work out every other group's path on the host.
"""

from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fractional_gpu.host.files import mount_table
from fractional_gpu.host.process import PROC

ROOT = PurePosixPath("/")


class Mount(NamedTuple):
    """A mounted part of a hierarchy. `root` is its top group's path on the host. `own` is this process's group if paths are hidden."""

    version: int
    controllers: frozenset[str]  # only for version 1
    root: PurePosixPath
    point: Path
    own: PurePosixPath | None = None

    def folder(self, group: PurePosixPath) -> Path | None:
        """Return a group's folder, which might not exist, or None if the group is outside the mounted part of the hierarchy."""
        shown = ".." not in group.parts and group.is_relative_to(self.root)
        return self.point / group.relative_to(self.root) if shown else None


def mounts(*, proc: Path = PROC) -> list[Mount]:
    found: dict[tuple[int, frozenset[str], PurePosixPath], Mount] = {}
    for line in mount_table(proc / "self/mountinfo"):
        if line.kind in ("cgroup", "cgroup2"):
            version = 2 if line.kind == "cgroup2" else 1
            controllers = frozenset(line.options.split(",")) if version == 1 else frozenset()
            root = PurePosixPath(line.root)
            found.setdefault((version, controllers, root), Mount(version, controllers, root, line.point))
    own: dict[tuple[int, frozenset[str]], PurePosixPath] = {}
    for (version, controllers, root), whole in found.items():
        inside = found.get((version, controllers, ROOT))
        if (levels := levels_up(root)) and inside is not None:
            status = inside.point.stat()
            if (group := _own_group(whole.point, levels, status.st_dev, status.st_ino)) is not None:
                own[version, controllers] = group
    resolved = []
    for mount in found.values():
        group = own.get((mount.version, mount.controllers))
        root = ROOT if levels_up(mount.root) else mount.root if group is None else absolute(mount.root, group)
        resolved.append(mount._replace(root=root, own=group))
    return resolved


def levels_up(root: PurePosixPath) -> int:
    """Return how many levels above the process's own group a root like `/../..` is. Return 0 for any other path."""
    names = root.parts[1:]
    return len(names) if names and set(names) == {".."} else 0


@cache
def _own_group(whole: Path, levels: int, device: int, inode: int) -> PurePosixPath | None:
    """Search `levels` levels below the mount `whole` for the group folder with this inode. Return the group's path on the host, or None."""
    for folder in whole.glob("/".join(["*"] * levels)):
        try:
            status = folder.stat()
        except OSError:
            continue  # the group has ended
        if (status.st_dev, status.st_ino) == (device, inode):
            return ROOT / folder.relative_to(whole)
    return None


def absolute(path: PurePosixPath, own: PurePosixPath) -> PurePosixPath:
    """Return the host path of the group that processes in the group `own` see as `path`."""
    names = path.parts[1:]
    ups = next((number for number, name in enumerate(names) if name != ".."), len(names))
    above = [own, *own.parents, *[ROOT] * ups][ups]
    return above.joinpath(*names[ups:])
