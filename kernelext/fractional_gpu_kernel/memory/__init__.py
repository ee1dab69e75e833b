"""Frameworks' memory in the kernel's process: limits, caches that can be given back, managed memory, profilers."""
