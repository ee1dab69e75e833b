"""Seats: a hub's servers' entitlements to GPUs, and how they are granted, used and revoked."""
