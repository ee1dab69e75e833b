"""Reports on lease usage, as totals, tables, JSON, chargeback rows and HTML. This package does no I/O."""
