"""The broker as a process: how it starts, restarts, detaches, keeps its files and exits, and how kernels are rescued without a broker."""
