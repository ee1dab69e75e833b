"""What a node agent writes into its cluster's engine, and when: counts of shares, and the pace of writes."""
