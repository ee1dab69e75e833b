"""Suspends and resumes kernels: the single steps, whole operations, and the consequences of a driver error."""
