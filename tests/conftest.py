"""What the ordinary run leaves out (tests/gpu needs a GPU and has its own command: docs/gpu-tests.md), and interrupts that work."""

import os
import signal

collect_ignore = [] if os.environ.get("JUPYTER_GPU_HARDWARE") else ["gpu"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it starts in the background, and so would every process that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
