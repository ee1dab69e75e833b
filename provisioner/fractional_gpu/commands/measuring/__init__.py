"""`jupyter gpu measure`: which share of a GPU a program needs, measured next to others on one device."""
