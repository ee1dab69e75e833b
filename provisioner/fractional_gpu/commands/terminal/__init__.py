"""Code shared by all commands: arguments, the connection to the broker, progress display, and terminal output."""
