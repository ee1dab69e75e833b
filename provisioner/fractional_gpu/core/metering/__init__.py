"""What leases use of devices, in integers that add up: time, shares, memory, energy, what it costs, and what is left of budgets."""
