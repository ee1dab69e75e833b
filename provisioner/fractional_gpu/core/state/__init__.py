"""The arbiter's state: leases, devices, accounts and tickets."""
