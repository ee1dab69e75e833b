"""The only event loop: turns the world into events and carries effects out."""
