"""The arbiter's state, which consists of leases, devices, accounts and tickets."""
