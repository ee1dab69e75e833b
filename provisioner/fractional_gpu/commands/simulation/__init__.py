"""Options of `jupyter gpu simulate` for sessions, the machine and metering."""
