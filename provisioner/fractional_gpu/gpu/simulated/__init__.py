"""The simulated GPU, for tests, demonstrations and trying things out.

There is no server process. Every process works directly on the folder of the simulated host:

- `host.sqlite` stores the devices, and how much memory each process has. Each change is one transaction, so a killed process leaves either
  the old or the new state.
- `memory/PROCESS/N.device` has the real bytes of an allocation on the device; while the process is checkpointed, `N.saved` has them.
  `PROCESS` contains the pid, the start time and the boot id, so a new process with the same pid gets another folder.
- `memory/PROCESS/gate` has a byte that lets the process's calls pass or holds them. Calls in flight hold a lock on this file.
- `memory/PROCESS/operation` is locked by the worker that performs an operation on the process. If it is unlocked while an operation is
  incomplete, the worker has died, and the next reader undoes the operation.
- `memory/PROCESS/work` and `load` tell when the process's work ends, and how much of the device it uses and has used.

If a broker that runs as root serves other users, they share the host; `store` describes the rules. The modules `store`, `processes`,
`context` and `cuda` run in notebooks and need only the standard library and the package `host`. Saved bytes are stored in files, whereas
the real driver keeps them in the process's resident memory.
"""
