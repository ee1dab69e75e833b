"""The boundary to devices: one interface for NVIDIA's and simulated GPUs, and the checkpoint worker."""
