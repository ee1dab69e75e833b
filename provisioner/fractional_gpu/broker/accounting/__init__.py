"""Accounts of what leases used: the meter's driver, reports and budgets."""
