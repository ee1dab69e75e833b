"""One host in virtual time: its arbiter, its devices, and the sessions that live there.

- A session's kernel is gated. A GPU cell is asked for: the kernel is busy from then on, `Wanted` goes out unless the lease is resident,
  and the cell runs once granted. The next cell comes as long after it as in the trace: a wait delays everything behind it.
- A wait is the time from asking to running, the restore included; cells that found their kernel resident count with zero.
  What else a user feels is in `felt`.
- A swap takes a fixed time and the bytes over the bandwidth. One that fails takes the fixed time and changes nothing.
- A cell of a suspended kernel that touches no GPU runs without asking.
- A cell that needs more than is reserved (where a pool reserves by use) takes what it may and waits for more; if none comes for
  `patience_ms` it fails as out of memory, and at once if it needs more than its cap.

`HostRun` is the host, and hands the arbiter's effects to its parts: `sessions` opens and closes notebooks, `cells` runs their cells,
`swaps` suspends and resumes their kernels, `leaving` takes devices away. `state` is what these share.
"""

from fractional_gpu.simulator.one_host.host_run import HostRun
from fractional_gpu.simulator.one_host.state import RunState, Watch

__all__ = ["HostRun", "RunState", "Watch"]
