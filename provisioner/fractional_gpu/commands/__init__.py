"""The `jupyter gpu` command."""
