"""An auditor of the simulator: recomputes the figures of a run from its record, and checks that the record is possible at all.

    python -m tests.simulator.audit RECORD [--json RESULT]

It shares no code with the simulator and the arbiter: it reads the record that `jupyter gpu simulate --set record=FILE` wrote
(docs/simulator-files.md describes the format), and imports the standard library only. With `--json` it compares its figures with those that
the run printed. The exit code is 1 if the record breaks a law or a figure differs, 2 if a file cannot be read.

The laws of all runs (`cells`):

- Time does not go back. On each device, memory in use fits the device. Memory is used only within what a session has on its devices, all
  of which are of its host.
- A cell is asked for as long after the one before as the trace says, has its memory when it begins, and takes 1 - u + u * k times its
  duration: k is the least number of whole thousandths, 1 or more, for which the cells on its (first) device use no more than all of it,
  each u / (1 - u + u * k) times what a cell fills. Here that is exact, in fractions; the record's whole milliseconds may be later by less
  than one, and by a nanosecond for each change of k.

Those of runs with the arbiter (`leases`):

- A session that opens is placed on the host that the rule of the door says (docs/simulator.md), among the hosts that can serve it. Its
  lease is for the smallest fraction that covers what it asks for.
- The effects are those that the digest says; leases go from the state in which they are. Reservations fit what leases may have of a
  device. A lease with several devices has all of them, and alone where it asked
  for all that they have.
- Saved memory fits the host's budget. A swap takes the fixed time and the bytes over the bandwidth; so many run on a host at a time as may.
- A cell begins when its lease is let in. A suspend in the middle of a cell stops it, unless it fails; a swap that fails takes the fixed
  time and moves nothing. A cell that waits for more memory fails after the patience of the run, not before, and at once beyond its cap.

Those of baselines without an arbiter (`baselines`):

- No session is at the door that could have its devices: with whole GPUs the one that came first, with fractions any. It takes those that
  the rule of the baseline says, no device gives more than it has or has more clients than it may, and a cell begins when it is asked for
  or, of a culled kernel, when it has its GPUs again.
- A kernel is culled after exactly so long without a cell, and only then. A cell fails if it needs more than there is for it, at once.

Two figures are not in the record: `wall_s` is of the machine, and `forecast_error` is of what the arbiter expected.
"""
