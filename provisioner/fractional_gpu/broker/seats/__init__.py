"""Seats, which entitle a hub's servers to GPUs: how they are granted, used and revoked."""
