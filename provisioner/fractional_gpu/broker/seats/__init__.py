"""Seats, the entitlements of a hub's servers: how they are given, used and revoked."""
