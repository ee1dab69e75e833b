"""The arbiter takes events and returns effects. It does no I/O and has no clock."""
