"""`jupyter gpu seats` and `jupyter gpu capacity`: what workloads and hub servers hold of the pools, and what is left."""
