"""The parts loaded by Jupyter: the kernel provisioner, kernelspecs, the launcher, and the kernel manager that keeps kernels running."""
