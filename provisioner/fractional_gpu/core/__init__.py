"""The arbiter: it turns events into effects, and does no I/O."""
