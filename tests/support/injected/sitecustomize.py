"""Python imports this at its start where this folder is in PYTHONPATH. It is not installed.

It adds the failpoints and faults of `injections`, which it imports only for modules that may have some: most of the processes that the
tests start have none, and its imports take longer than a small process.
"""

import os
import sys

import quick_start  # type: ignore[import-not-found]  # noqa: F401 - this file hides the `sitecustomize` of tests/support/quick

_CHANGED = "fractional_gpu" if "JUPYTER_GPU_FAILPOINTS" in os.environ else "fractional_gpu.gpu.simulated."


class _Finder:
    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> object:
        if not fullname.startswith(_CHANGED):
            return None
        import injections  # type: ignore[import-not-found]  # noqa: PLC0415 - as above

        return injections.find_spec(fullname, path, target)


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
