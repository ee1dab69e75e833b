"""Reports of what leases used: sums, tables, JSON, chargeback rows and HTML. Figures in, text out; no I/O."""
