"""`jupyter gpu measure` finds the share of a GPU that a program needs, by running it next to others on one device."""
