"""The program of a Slurm job: a real kernel on the job's share, whose cells a test sends and whose output it reads by files in a folder.

    python -m tests.support.slurm_job FOLDER

`N.in` has the code of cell N, `N.out` gets what it printed; a file `end` ends the kernel and the job.
"""

import os
import site
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.waiting import until

__all__ = ["JobKernel", "job_command"]

_LONG_S = 240.0


class JobKernel:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(mode=0o777)
        self.folder.chmod(0o777)
        self._sent = 0

    @property
    def command(self) -> str:
        return job_command(self.folder)

    def start_cell(self, code: str) -> Path:
        fresh = self.folder / f"{self._sent}.fresh"
        fresh.write_text(code)
        fresh.rename(self.folder / f"{self._sent}.in")
        self._sent += 1
        return self.folder / f"{self._sent - 1}.out"

    def cell(self, code: str) -> str:
        out = self.start_cell(code)
        until(out.exists, f"a cell in {self.folder} ends", deadline_s=_LONG_S)
        return out.read_text()

    def end(self) -> None:
        (self.folder / "end").touch()


def job_command(folder: Path) -> str:
    return f"exec {sys.executable} -m tests.support.slurm_job {folder}"


def main(folder: Path) -> None:
    site.addsitedir(str(ROOT / "provisioner"))  # reads its .pth, as Python does at its start for an installed package
    from jupyter_client.manager import start_new_kernel  # noqa: PLC0415 - it is changed by the above

    tempfile.tempdir = str(folder)  # a job that is cancelled leaves its kernel's connection file
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=120)
    try:
        for number in count():
            source, end = folder / f"{number}.in", folder / "end"
            until(lambda: source.exists() or end.exists(), "a cell, or the end", deadline_s=_LONG_S)  # noqa: B023 - called at once
            if not source.exists():
                return
            said: list[str] = []

            def hear(message: dict[str, Any]) -> None:
                content = message["content"]
                said.append(content.get("text", "") or "\n".join(content.get("traceback", ())))  # noqa: B023 - as above

            client.execute_interactive(source.read_text(), output_hook=hear, timeout=_LONG_S)
            fresh = folder / f"{number}.fresh"
            fresh.write_text("".join(said))
            fresh.rename(folder / f"{number}.out")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


if __name__ == "__main__":
    os.umask(0o022)
    main(Path(sys.argv[1]))
