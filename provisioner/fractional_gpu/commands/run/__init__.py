"""`jupyter gpu run`: the program's process, the signs that the program needs the GPU, and its lease."""
