"""Holds bytes on the simulated GPU for a kernel of another language: `holder.py SEED MIB QUESTIONS ANSWERS` (two named pipes).

For each line on QUESTIONS it writes a line to ANSWERS: whether every byte is still there. It ends with the shell that started it,
because a killed shell does not signal its jobs.
"""

import ctypes
import hashlib
import random
import signal
import sys
from pathlib import Path

from fractional_gpu.gpu.simulated import cuda

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(seed: str, mib: str, questions: str, answers: str) -> None:
    """Serve until the pipes are gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    data = random.Random(int(seed)).randbytes(1 << 20) * int(mib)
    buffer = cuda.allocate(len(data))
    buffer.write(data)
    digest = hashlib.sha256(data).hexdigest()
    del data
    Path(answers).write_text("filled\n")
    while Path(questions).exists():
        Path(questions).read_text()
        intact = hashlib.sha256(buffer.read()).hexdigest() == digest
        Path(answers).write_text("intact\n" if intact else "the bytes differ\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
