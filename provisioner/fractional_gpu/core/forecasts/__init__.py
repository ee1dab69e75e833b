"""Statistics learnt on line, in integers: swap times, cell times, their accuracy."""
