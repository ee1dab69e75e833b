"""Accounts of what leases used: metering, reports and budgets."""
