"""`jupyter gpu report` and `jupyter gpu budget`: what kernels used, what it costs, and what is left."""
