"""The simulated GPU: for tests, demonstrations and trying out.

There is no server process: every process works directly on the host's folder.

- `host.sqlite`: the devices, and how much each process holds. One transaction per change, so a kill leaves the old or the new state.
- `memory/PROCESS/N.device`: the real bytes of an allocation on the device, `N.saved` while checkpointed. `PROCESS` is pid, start time and
  boot, so a reused pid is another process.
- `memory/PROCESS/gate`: a byte that lets the process's calls pass or holds them, and a file lock for calls in flight.
- `memory/PROCESS/operation`: locked by the process that moves this one. If it is unlocked while an operation is half done, the mover
  died, and the next reader undoes the operation.
- `memory/PROCESS/work` and `load`: when its work ends, and how much of the device it uses and has used.

If root's broker serves users, they share the host: `store` has the rules. `store`, `processes`, `context` and `cuda` run in notebooks
and need only the standard library and the package `host`. Saved bytes are in files, not in resident memory as with the real driver.
"""
