"""`jupyter gpu measure` finds out how large a share of a GPU a program needs when it runs alongside others on the same device."""
