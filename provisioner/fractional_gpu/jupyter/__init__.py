"""The parts that Jupyter loads: the kernel provisioner, kernelspecs, the launcher, and the kernel manager that keeps kernels running."""
