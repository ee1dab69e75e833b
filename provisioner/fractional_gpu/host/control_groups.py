"""Paths of control groups for a process that has a control group namespace of its own, as one in a container has.

Such a process sees the groups above its own as `/..`, once for each level: another pod's group is `/../../podUID/...`, and the root of the
whole hierarchy, where that is mounted too (a host path), is `/../../..`. What lies between is not named. So its own group is looked for
once in the whole hierarchy, by the inode of its folder; with that every path is one of the host again.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = PurePosixPath("/")


def levels_up(root: PurePosixPath) -> int:
    """Return how many levels above its own a process sees this root, if that is all that the path says; 0 for any other path."""
    names = root.parts[1:]
    return len(names) if names and set(names) == {".."} else 0


def own_group(whole: Path, levels: int, inside: Path) -> PurePosixPath | None:
    """Return the host's path of the reader's own group; None if it is not found. Raises OSError.

    `whole`: where the hierarchy is mounted whole, `levels` levels above the reader's group; `inside`: where it is mounted from that group
    on.
    """
    status = inside.stat()
    return _found(whole, levels, status.st_dev, status.st_ino)


@cache
def _found(whole: Path, levels: int, device: int, inode: int) -> PurePosixPath | None:
    for folder in _at_depth(whole, levels):
        try:
            status = folder.stat()
        except OSError:
            continue  # the group has ended meanwhile
        if (status.st_dev, status.st_ino) == (device, inode):
            return ROOT / folder.relative_to(whole)
    return None


def _at_depth(folder: Path, levels: int) -> Iterator[Path]:
    if levels == 0:
        yield folder
        return
    try:
        below = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for one in below:
        yield from _at_depth(one, levels - 1)


def absolute(path: PurePosixPath, own: PurePosixPath) -> PurePosixPath:
    """Return the host's path of a group that a process of the group `own` sees as `path`."""
    names = path.parts[1:]
    ups = next((number for number, name in enumerate(names) if name != ".."), len(names))
    above = [own, *own.parents, *[ROOT] * ups][ups]
    return above.joinpath(*names[ups:])
