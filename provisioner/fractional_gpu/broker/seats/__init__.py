"""Seats, the entitlements of a hub's servers, and how they are granted, used and revoked."""
