"""Simulates GPUs for tests, demonstrations and experiments.

There is no server process. Every process works directly in the simulated host's folder:

- `host.sqlite` stores the devices and how much memory each process has. Each change is a single transaction, so a killed process leaves
  either the old state or the new one.
- `memory/PROCESS/N.device` holds an allocation's actual bytes while they are on the device; `N.saved` holds them while the process is
  checkpointed. `PROCESS` consists of the pid, start time and boot id, so a new process with the same pid gets a different folder.
- `memory/PROCESS/gate` contains one byte that lets the process's calls through or holds them back. Calls in flight hold a lock on it.
- `memory/PROCESS/operation` is locked by the worker while it performs an operation on the process. If the file is unlocked but an operation
  is incomplete, the worker has died, and the next reader undoes the operation.
- `memory/PROCESS/work` and `load` record when the process's work ends, how much of the device it is using, and how much it has used.

If a broker running as root serves other users, they share the host; `store` describes the rules. The modules `store`, `processes`,
`context` and `cuda` run in notebooks and need only the standard library and the package `host`. Saved bytes are kept in files, whereas the
real driver keeps them in the process's resident memory.
"""
