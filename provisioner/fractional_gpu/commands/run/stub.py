"""Replaces itself with the command given to `jupyter gpu run` once it has the GPU. This script imports only the standard library.

    python -I -S stub.py RUNNER IN OUT COMMAND [ARGUMENTS]

Because exec keeps the pid, the broker knows the pid before the command runs. RUNNER is the parent's pid. The stub reads the command's
environment as JSON from file descriptor IN, and exits if it reads nothing. If exec fails, the stub writes the error number to file
descriptor OUT. The command gets SIGTERM if its runner dies (PR_SET_PDEATHSIG).
"""

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    runner, source, sink = map(int, sys.argv[1:4])
    command = sys.argv[4:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != runner:  # the runner died before that call
        return 1
    with os.fdopen(source, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    if not text:
        return 1
    os.set_inheritable(sink, False)  # exec closes it, which tells the runner that the command runs
    environment = json.loads(text)
    if environment.pop("JUPYTER_GPU_CHECKPOINT_JOB", ""):  # as in `fractional_gpu_kernel.__main__`
        job = os.memfd_create("cuda-checkpoint-job", 0)  # exec does not close it
        environment["CUDA_CHECKPOINT_JOB_FILE"] = f"/proc/{os.getpid()}/fd/{job}"
    # Python ignores these signals when it starts, so restore the defaults for the command.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 - no shell is wanted
    except OSError as error:
        os.write(sink, str(error.errno).encode())
    return 1


if __name__ == "__main__":
    sys.exit(main())
