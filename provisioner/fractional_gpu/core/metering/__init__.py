"""How much leases use devices, in integers that add up: time, shares, memory, energy, costs, and what is left of budgets."""
