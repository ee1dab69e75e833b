"""Runs the broker as a managed service of the hub, and keeps it running until the hub is gone.

JupyterHub stops its services before its users' servers. A server's seat is only given back once the server has stopped, so the broker must
outlive the service. On SIGTERM, this process exits at once, as the hub expects, and leaves a child process that stops the broker when the
hub exits or after `LINGER_S` seconds. This script stays in memory while the hub runs, so it only imports the standard library.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

LINGER_S = 300.0
_ENDED_BY_SIGNAL = 128  # added to the number of the signal, as shells do
_OURS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})


def main(command: Sequence[str]) -> int:
    hub = os.pidfd_open(os.getppid())
    # Block the signals before the broker starts. `sigwait` reads them later, so a broker that ends immediately is noticed.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    with subprocess.Popen(command, preexec_fn=unblock) as broker:  # noqa: PLW1509 - there is only one thread, and this only sets a mask
        pidfd = os.pidfd_open(broker.pid)
        while signal.sigwait(_OURS) is signal.SIGCHLD:
            if broker.poll() is not None:
                return broker.returncode if broker.returncode >= 0 else _ENDED_BY_SIGNAL - broker.returncode
        if os.fork():
            os._exit(0)  # the hub waits for this process, but must not wait for the broker
        _stop_after(hub, pidfd)
        os._exit(0)


def _stop_after(hub: int, broker: int) -> None:
    ended, _, _ = select.select([hub, broker], [], [], LINGER_S)
    if broker not in ended:
        signal.pidfd_send_signal(broker, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
