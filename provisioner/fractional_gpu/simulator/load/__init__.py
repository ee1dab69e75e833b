"""Synthetic load: what a group of notebook users does, by the statistics of a published trace or by other habits.

`synthetic_sessions` makes the sessions of so many users over so many days, by the switches of `Load`. What is drawn for one thing in one
session comes from random numbers of its own, so what one switch changes leaves the other draws as they are. One seed gives one trace, on
every machine.
"""

from fractional_gpu.simulator.load.settings import CLASS_SIZE, SEVERAL_PERCENT, Habit, Load, Memory, Pace
from fractional_gpu.simulator.load.signs import SIGN_MS, Signs
from fractional_gpu.simulator.load.synthetic import synthetic_sessions

__all__ = [
    "CLASS_SIZE",
    "SEVERAL_PERCENT",
    "SIGN_MS",
    "Habit",
    "Load",
    "Memory",
    "Pace",
    "Signs",
    "synthetic_sessions",
]
