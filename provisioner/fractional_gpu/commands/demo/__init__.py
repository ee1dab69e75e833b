"""Commands that open notebooks or install kernels: kernels, lab, demo."""
