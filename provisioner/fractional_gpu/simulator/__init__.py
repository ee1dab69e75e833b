"""The simulator: the arbiter in virtual time. Its errors are defined here."""

__all__ = ["SimulationError", "TraceError"]


class SimulationError(Exception):
    """The simulation cannot be run as requested; the message says what was given, what is allowed and what to do."""


class TraceError(SimulationError):
    """A file of a trace has the wrong form; the message names the file and the line."""
