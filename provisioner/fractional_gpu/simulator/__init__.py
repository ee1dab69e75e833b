"""Drives the arbiter in virtual time."""
