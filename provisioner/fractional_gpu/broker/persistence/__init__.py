"""The broker's files: ledger, lease files, audit log, forecasts."""
