"""Tracks how much leases use devices, what this costs, and how much of each budget is left. All figures are integers."""
