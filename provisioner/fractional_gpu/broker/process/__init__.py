"""The broker as a process: start, restart, detaching, its own files, an orderly end, and the rescue without a broker."""
