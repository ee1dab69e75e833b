"""The boundary to devices: one interface, NVIDIA's devices, the simulated GPU, and the checkpoint worker."""
