"""The arbiter: pure decisions, events in, effects out."""
