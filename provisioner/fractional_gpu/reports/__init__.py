"""What leases used, shown: sums of it, and reports as tables, JSON, chargeback rows and HTML. Figures in, text out; no I/O."""
