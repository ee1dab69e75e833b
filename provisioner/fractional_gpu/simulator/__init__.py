"""Runs the arbiter in virtual time. This file defines the simulator's errors."""

__all__ = ["SimulationError", "TraceError"]


class SimulationError(Exception):
    """The simulation cannot run as requested. The message says what was given, what is allowed and what to do."""


class TraceError(SimulationError):
    """A trace file is malformed. The message names the file and the line."""
