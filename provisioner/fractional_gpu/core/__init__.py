"""The arbiter takes events and returns effects, without I/O."""
