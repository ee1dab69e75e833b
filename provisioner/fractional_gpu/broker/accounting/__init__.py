"""What leases used, written down: the meter's driver, reports of it, and budgets."""
