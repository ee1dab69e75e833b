"""Supports NVIDIA devices: `monitor` reads them through NVML, `checkpointer` controls processes, `support` lists supported releases."""
