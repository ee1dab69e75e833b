"""NVIDIA's devices: `monitor` reads them through NVML, `checkpointer` drives processes through the driver, `support` has the releases."""
