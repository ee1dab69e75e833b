"""`python -m fractional_gpu_kernel MODULE ...` runs ipykernel's MODULE as `python -m MODULE ...` does, with our extension loaded first.

This sets no trait: a list of extensions on the command line would replace a user's or a site's. MODULE sees its usual `sys.path`,
`sys.argv` and `__main__`.
"""

import os
import sys

if os.environ.pop("JUPYTER_GPU_CHECKPOINT_JOB", ""):
    # NVIDIA's driver reads this when it starts. By this path a child that executes another program finds the file, too.
    os.environ["CUDA_CHECKPOINT_JOB_FILE"] = f"/proc/{os.getpid()}/fd/{os.memfd_create('cuda-checkpoint-job')}"

module = sys.argv.pop(1)
folder = [] if sys.flags.safe_path else [sys.path.pop(0)]  # its modules must not hide those that ipykernel imports

import runpy  # noqa: E402 - as above

from ipykernel.kernelapp import IPKernelApp  # noqa: E402 - as above

sys.path[:0] = folder
application = IPKernelApp.instance()  # the one that ipykernel will use
application.default_extensions = [*application.default_extensions, "fractional_gpu_kernel"]
runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # noqa: SLF001 - runpy.run_module would restore `__main__` before exit handlers run
