"""Supports NVIDIA devices: `monitor` reads them through NVML, `checkpointer` controls processes, and `support` lists supported releases."""
