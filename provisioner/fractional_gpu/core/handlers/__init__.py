"""What each kind of event changes: the life of a lease, results of operations, pins, sizes, caps, drains."""
