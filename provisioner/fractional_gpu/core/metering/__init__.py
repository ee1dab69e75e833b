"""Adds up how much leases use devices, what this costs, and what is left of budgets. All figures are integers."""
