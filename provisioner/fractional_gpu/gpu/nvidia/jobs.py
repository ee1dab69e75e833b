"""Supports checkpoint jobs, which let the driver checkpoint a process whose forked children are still running.

To start a program in a job, set the variable `CUDA_CHECKPOINT_JOB_FILE` to the job file's path. Callers of the checkpoint API set it to the
same path. The file is a memfd that the program's forked children inherit. Operations on a job's processes must not overlap.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

JOB_FILE: Final = "CUDA_CHECKPOINT_JOB_FILE"
REQUEST: Final = "JUPYTER_GPU_CHECKPOINT_JOB"
"""Setting this environment variable makes a program start in a job."""

NAME: Final = "cuda-checkpoint-job"
_LINK: Final = f"/memfd:{NAME} (deleted)"


@contextmanager
def job_of(pid: int) -> Iterator[None]:
    """During the block, point this process's job-file variable at the job file of process `pid`, if it has one."""
    descriptor = _open_job(pid)
    if descriptor is None:
        yield
        return
    os.environ[JOB_FILE] = f"/proc/self/fd/{descriptor}"
    try:
        yield
    finally:
        del os.environ[JOB_FILE]
        os.close(descriptor)


def _open_job(pid: int) -> int | None:
    folder = f"/proc/{pid}/fd"
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for name in os.listdir(folder):  # noqa: PTH208 - as below
            with suppress(FileNotFoundError, ProcessLookupError):
                if os.readlink(f"{folder}/{name}") != _LINK:  # noqa: PTH115 - a process may have thousands
                    continue
                descriptor = os.open(f"{folder}/{name}", os.O_RDWR | os.O_CLOEXEC)
                # The process's owner may have replaced the file to make us write to another one.
                if os.readlink(f"/proc/self/fd/{descriptor}") == _LINK:  # noqa: PTH115 - as above
                    return descriptor
                os.close(descriptor)
    return None
