"""Keeps ipykernel from importing the package of this name, which takes a fifth of a kernel's start.

Without it ipykernel refuses `debug_request`, and is the same otherwise. The kernels of tests/jupyter and of the tests that debug one
import it.
"""

raise ImportError("left out: its import takes a fifth of a kernel's start")
