"""What the ordinary run leaves out: tests/gpu needs a GPU (docs/gpu-tests.md) and is run by its own command."""

import os

collect_ignore = [] if os.environ.get("JUPYTER_GPU_HARDWARE") else ["gpu"]
