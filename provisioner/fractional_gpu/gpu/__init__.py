"""The boundary to devices: one interface, the simulated GPU, NVIDIA's, and the checkpoint worker."""
