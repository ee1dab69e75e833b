"""What `jupyter gpu simulate` is told: whose sessions, on what machine, and how what they use is metered."""
