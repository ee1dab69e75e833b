"""The job file of a process, named in the caller's environment for the time of a call."""

import os

from fractional_gpu.gpu.nvidia.jobs import JOB_FILE, NAME, job_of


def named_inode() -> int | None:
    path = os.environ.get(JOB_FILE)
    return None if path is None else os.stat(path).st_ino  # noqa: PTH116 - a link of /proc


def test_the_job_of_a_process_is_named_only_during_the_call() -> None:
    job = os.memfd_create(NAME)
    try:
        with job_of(os.getpid()):
            assert named_inode() == os.fstat(job).st_ino
    finally:
        os.close(job)
    assert named_inode() is None


def test_a_process_without_a_job_or_with_another_memfd_or_gone_has_none() -> None:
    other = os.memfd_create(f"{NAME}-2")
    try:
        for pid in (os.getpid(), 2**22 + 1):
            with job_of(pid):
                assert named_inode() is None
    finally:
        os.close(other)
