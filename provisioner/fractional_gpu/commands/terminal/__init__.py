"""Code shared by all commands: arguments, the connection to the broker, progress, and text for terminals."""
