"""The arbiter, which turns events into effects and does no I/O."""
