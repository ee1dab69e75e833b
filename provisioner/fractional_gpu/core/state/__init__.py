"""What the arbiter knows: leases, devices, accounts, tickets."""
