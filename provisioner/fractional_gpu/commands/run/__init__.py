"""`jupyter gpu run`: its command's process, the signs that it needs the GPU, and the lease that follows them."""
