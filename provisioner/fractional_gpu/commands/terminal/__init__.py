"""Shared by the commands: arguments, the connection to the broker, progress, and text for terminals."""
