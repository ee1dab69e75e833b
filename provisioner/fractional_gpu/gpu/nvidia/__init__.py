"""NVIDIA devices: `monitor` reads them through NVML, `checkpointer` asks the driver to checkpoint, `support` lists releases."""
