"""What the simulator refuses."""

__all__ = ["SimulationError", "TraceError"]


class SimulationError(Exception):
    """The simulation cannot be run as asked; the message says what was given, what is allowed and what to do."""


class TraceError(SimulationError):
    """A file of a trace is not what it should be; the message names the file and the line."""
