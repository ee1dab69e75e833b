"""The jupyter gpu command."""
