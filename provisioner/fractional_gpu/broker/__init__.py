"""The broker's event loop. It turns what happens on the host into events for the arbiter, and carries out the arbiter's effects."""
