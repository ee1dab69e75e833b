"""`jupyter gpu run` runs a program under a lease: the program's process, the signs that it needs the GPU, and its lease."""
