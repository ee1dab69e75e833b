"""Seats of a hub's servers: what they are entitled to, how seats are given, used and revoked."""
