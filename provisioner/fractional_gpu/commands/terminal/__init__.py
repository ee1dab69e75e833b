"""What the commands share: errors, the connection to the broker, kinds of commands about leases, text for terminals, completion."""
