"""The simulated GPU: for tests, demonstrations and trying out.

There is no server process. A simulated host is a folder, and every process that uses it works on that folder
directly, so that no daemon's death harms anyone:

- `host.sqlite` says which devices there are and who holds how much of what. One transaction per change: a process
  killed at any instant leaves either the old truth or the new one.
- `memory/PROCESS/N.device` is one allocation's real bytes on the device, `N.saved` the same while it is
  checkpointed. `PROCESS` is pid, start time and boot, so a reused pid is another process.
- `memory/PROCESS/gate` is one byte that lets the process's calls pass or holds them, and the file lock by which
  calls in flight are known. The kernel releases such locks when a process dies.
- `memory/PROCESS/operation` is locked by whoever locks, checkpoints, restores or unlocks the process. If it is
  free and an operation is half done, its maker died, and whoever looks next undoes it.

`store`, `processes`, `gate` and `cuda` are the notebook's side and need only the standard library. The saved
bytes lie in files, so unlike with the real driver they are not in the target's resident set.
"""
