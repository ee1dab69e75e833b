"""`jupyter gpu measure` finds out how large a GPU share a program needs when other programs use the same device."""
