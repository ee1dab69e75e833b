"""The options of `jupyter gpu simulate`: sessions, machine and metering."""
