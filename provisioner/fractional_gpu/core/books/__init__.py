"""The books of the arbiter: leases, tickets, devices, accounts."""
