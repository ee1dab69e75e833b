"""Reports of what leases used, as sums, tables, JSON, chargeback rows and HTML. This package does no I/O."""
