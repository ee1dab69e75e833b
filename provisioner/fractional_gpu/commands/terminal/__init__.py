"""What all commands share: arguments, the connection to the broker, progress, and text for terminals."""
