"""How cells get the GPU: the gate, the wait before a cell, and the kernel's connection to the broker."""
