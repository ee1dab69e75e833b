"""`jupyter gpu demo`: two notebooks take turns on one GPU, in a sandbox that leaves nothing behind."""
