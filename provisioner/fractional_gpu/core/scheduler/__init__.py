"""Which ticket is served next, on which device, and which leases leave for it."""
