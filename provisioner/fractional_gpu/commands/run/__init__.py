"""`jupyter gpu run`: the command's process, the signs that it needs the GPU, and its lease."""
