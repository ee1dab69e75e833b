"""Servers that are taken back: published lifetimes, what leaves when, and what is saved before, in our order and in others."""
