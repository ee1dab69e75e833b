"""What the commands share: errors, the connection to the broker, text for terminals, completion."""
