"""The simulated GPU: for tests, demonstrations and trying out.

There is no server that can die: every process works directly on the host's folder.

- `host.sqlite`: the devices, and how much each process holds. One transaction per change, so a kill leaves the old state or the new one.
- `memory/PROCESS/N.device`: the real bytes of an allocation on the device, `N.saved` while checkpointed. `PROCESS` is pid, start time and
  boot, so a reused pid is another process.
- `memory/PROCESS/gate`: a byte that lets the process's calls pass or holds them, and a file lock of the calls in flight.
- `memory/PROCESS/operation`: locked by the process that moves this one. If it is free while an operation is half done, that process died,
  and the next reader undoes the operation.
- `memory/PROCESS/work` and `load`: when its work ends, and what it uses and has used of the device.

If root's broker serves users, the host is shared: `store` has the rules. `store`, `processes`, `context` and `cuda` are the notebook's side
and need only the standard library and the folder `host`. Saved bytes are in files, so unlike with the real driver not in resident memory.
"""
