"""Suspends and resumes kernels: the individual steps, whole operations, and the consequences of driver errors."""
