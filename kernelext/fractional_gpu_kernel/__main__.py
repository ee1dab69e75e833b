"""`python -m fractional_gpu_kernel MODULE ...` loads our extension, then runs ipykernel's MODULE as `python -m MODULE ...` would.

It does not set any traits, because a list of extensions on the command line would replace the user's or the site's list. MODULE sees its
usual `sys.path`, `sys.argv` and `__main__`.
"""

import os
import sys

if os.environ.pop("JUPYTER_GPU_CHECKPOINT_JOB", ""):
    # NVIDIA's driver reads this variable when it starts. A child process that executes another program can also open this path.
    os.environ["CUDA_CHECKPOINT_JOB_FILE"] = f"/proc/{os.getpid()}/fd/{os.memfd_create('cuda-checkpoint-job')}"

module = sys.argv.pop(1)
# Modules in this folder must not hide those that ipykernel imports.
folder = [] if sys.flags.safe_path else [sys.path.pop(0)]

import runpy  # noqa: E402 - as above

from ipykernel.kernelapp import IPKernelApp  # noqa: E402 - as above

sys.path[:0] = folder
application = IPKernelApp.instance()  # ipykernel will use this instance
application.default_extensions = [*application.default_extensions, "fractional_gpu_kernel"]
runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # noqa: SLF001 - runpy.run_module would restore `__main__` before exit handlers run
