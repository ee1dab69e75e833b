"""Accounts for what leases use: metering, reports and budgets."""
