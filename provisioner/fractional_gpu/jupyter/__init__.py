"""Loaded by Jupyter: the kernel provisioner, kernelspecs, the launcher, the kernel manager that keeps kernels."""
