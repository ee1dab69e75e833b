"""Produces reports on lease usage: totals, tables, JSON, chargeback rows and HTML. This package does no I/O."""
