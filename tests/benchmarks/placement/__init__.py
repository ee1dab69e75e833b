"""How much of a cluster's GPUs a choice of nodes and devices can allocate: the published placement benchmark."""
