"""Carries out the actions of users and administrators on leases and devices, and reports the status of both."""
