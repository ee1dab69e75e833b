"""`jupyter gpu node`: what runs on the nodes of a cluster."""
