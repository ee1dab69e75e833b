"""A kernel whose ports another process tries to get in the moment before it listens on them.

Run as a program with the connection file and a file that says, a line for each start, which ports the other process got.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.tiny_kernel import TinyKernel

if __name__ == "__main__":
    connection = json.loads(Path(sys.argv[1]).read_text())
    ports = [str(number) for name, number in connection.items() if name.endswith("_port")]
    command = [sys.executable, "-m", "tests.support.robber", connection["ip"], *ports]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as robber:
        assert robber.stdout is not None
        with Path(sys.argv[2]).open("a") as said:
            said.write(robber.stdout.readline())
        TinyKernel(connection).run()
