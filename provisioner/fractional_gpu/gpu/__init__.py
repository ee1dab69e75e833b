"""Access to devices: the interface, its implementations for NVIDIA and simulated devices, and the checkpoint worker."""
