"""The broker as a process: how it starts, restarts, detaches, keeps its files and ends, and the rescue without a broker."""
