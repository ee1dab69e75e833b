"""Session, machine and metering options for `jupyter gpu simulate`."""
