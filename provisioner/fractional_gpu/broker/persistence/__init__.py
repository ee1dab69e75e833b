"""What the broker writes to disk: ledger, lease files, audit log, forecasts."""
