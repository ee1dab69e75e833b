"""`jupyter gpu measure`: which share of a GPU a program needs, measured beside others on one device."""
