"""The simulated GPU: for tests, demonstrations and trying out.

There is no server process. A simulated host is a folder, and every process that uses it works on that folder
directly, so that no daemon can die:

- `host.sqlite` has the devices, and how much each process holds on which. One transaction per change: a process killed
  at any instant leaves either the old state or the new one.
- `memory/PROCESS/N.device` is one allocation's real bytes on the device, `N.saved` the same while it is
  checkpointed. `PROCESS` is pid, start time and boot, so a reused pid is another process.
- `memory/PROCESS/gate` is one byte that lets the process's calls pass or holds them, and a file lock that calls in
  flight hold. The kernel releases such locks when a process dies.
- `memory/PROCESS/operation` is locked by the process that locks, checkpoints, restores or unlocks this one. If it is
  free while an operation is half done, that process died, and the next reader undoes the operation.
- `memory/PROCESS/work` and `memory/PROCESS/load` say when the process's work on the device ends, what it uses of the device now, and
  what it has used so far. Work that asks for more than the whole device together is slowed down (`load`).

Where root's broker serves users, the host is shared: `store` has the rules, `device_memory` says whose memory its bytes are.

`store`, `processes`, `context` and `cuda` are the notebook's side and need only the standard library and the room `host`. The saved
bytes lie in files, so unlike with the real driver they are not in the target's resident set.
"""
