"""Synthetic loads of the tests."""

from fractional_gpu.simulator.load import Load, Memory, Pace

BUSY = Load(pace=Pace.SHORT, memory=Memory.CELL, several_percent=0)
"""Many short cells on one GPU each: the most swaps."""

ONE_GPU = Load(several_percent=0)
"""As in the trace, but for sessions that use several GPUs."""
