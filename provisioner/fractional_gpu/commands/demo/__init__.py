"""`jupyter gpu demo` runs two notebooks that take turns on one GPU, in a sandbox that leaves nothing behind."""
