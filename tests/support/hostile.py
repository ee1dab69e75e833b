"""A broker as a machine's service, a user whose programs swap on it, and other users who attack it (`attacks`). Takes root.

PYTHONPATH, if it is set, names the packages to use, from any checkout.
"""

import json
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.messages import LeaseRequest
from tests.support.paths import COMPLETE_PYTHONPATH
from tests.support.waiting import DEADLINE_S, until

__all__ = ["ATTACKERS", "Figures", "Service", "User", "attacking", "service", "user"]

USER: Final = pwd.getpwnam("games").pw_uid
ATTACKERS: Final = tuple(range(61_001, 61_006))
"""User ids without an entry in the system's files."""
_FOLDER: Final = Path(__file__).parent
_START_S: Final = 120.0
_SAMPLE_S: Final = 0.2


class Service:
    """A broker that serves all users, and is restarted when it ends, as systemd would do."""

    def __init__(self, folder: Path, simulate: str, *, one_account: bool) -> None:
        self.socket = str(folder / "gpu" / "broker.sock")
        self.peak_mib = 0.0  # resident, since `forget_peak`
        self._simulated = ""  # the folder of the simulated devices
        self._state, self._log = folder / "state", folder / "broker.log"
        config = folder / "config.py"
        config.write_text('c.GPUBroker.account_of_unknown_uids = "nobody"\n' if one_account else "")
        serve = f"broker --service --socket {self.socket} --simulate {simulate} --state-dir {self._state} --config {config}".split()
        # The signal comes when the thread ends that started it, with this process at the latest.
        self._command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "fractional_gpu.commands.main", *serve]
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")},
            "PYTHONPATH": os.environ.get("PYTHONPATH") or COMPLETE_PYTHONPATH,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._supervise)

    def start(self) -> None:
        self._thread.start()
        until(self._serves, "the broker serves")
        with BrokerClient(self.socket) as client:
            lease = client.create_lease(LeaseRequest(fraction_milli=125))
            self._simulated = lease.environment["JUPYTER_GPU_SIMULATED_DIR"]
            client.release(lease.lease_id)

    def stop(self) -> None:
        self._stopping = True
        end_s = time.monotonic() + DEADLINE_S
        while self._thread.is_alive():
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM if time.monotonic() < end_s else signal.SIGKILL)
            self._thread.join(1.0)
        if self._simulated:  # the broker leaves it for leases that live
            shutil.rmtree(self._simulated, ignore_errors=True)

    def identity(self) -> tuple[int, bytes]:
        """Return what changes when the broker restarts, or executes itself again."""
        assert self._process is not None
        with suppress(OSError):
            return self._process.pid, Path(f"/proc/{self._process.pid}/auxv").read_bytes()
        return self._process.pid, b""

    def forget_peak(self) -> None:
        with suppress(OSError):
            Path(f"/proc/{self.identity()[0]}/clear_refs").write_text("5")
        self.peak_mib = 0.0

    def state_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._state.rglob("*") if path.is_file())

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def _serves(self) -> bool:
        with BrokerClient(self.socket) as client, suppress(BrokerUnavailableError):
            return client.ping().simulated
        return False

    def _supervise(self) -> None:
        while not self._stopping:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, env=self._environment, cwd="/", stdout=log, stderr=log, start_new_session=True
                )
            while self._process.poll() is None:
                self.peak_mib = max(self.peak_mib, _peak_mib(self._process.pid))
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_SAMPLE_S)


def _peak_mib(pid: int) -> float:
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()):
            return int(found[1]) / 1024
    return 0.0


@contextmanager
def service(simulate: str = "1x1GiB", *, one_account: bool = False) -> Iterator[Service]:
    """A service for one block, in a folder that all users may enter. `one_account`: uids without a user count as one user."""
    folder = Path(tempfile.mkdtemp(prefix="jfg-"))
    folder.chmod(0o755)
    one = Service(folder, simulate, one_account=one_account)
    try:
        one.start()
        yield one
    finally:
        one.stop()
        shutil.rmtree(folder)


# -- users -------------------------------------------------------------------------------------------------------------


class _Program:
    def __init__(self, uid: int, program: str, words: Sequence[str]) -> None:
        kept = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH") or COMPLETE_PYTHONPATH}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_FOLDER / program), *words],
            env={**kept, "HOME": "/nonexistent"},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that `select` sees what was not read
            start_new_session=True,
            user=uid,
            group=uid,
            extra_groups=[],
        )

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def line(self, within_s: float) -> str | None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a user's program ended")
        return line.decode()

    def hang_up(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DEADLINE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the user noticed; see `swapping_user`."""

    ping_s: list[float]
    cell_s: list[float]
    failed: dict[str, int]
    wrong: int
    swaps: int


class User(_Program):
    def go(self) -> None:
        self.say("go")

    def stop(self) -> None:
        self.say("stop")

    def figures(self, within_s: float) -> Figures | None:
        line = self.line(within_s)
        return None if line is None else Figures(**json.loads(line))


@contextmanager
def user(one: Service, *, programs: int = 2, threads: int = 1, uid: int = USER) -> Iterator[User]:
    """A user for one block; `threads` of the programs want a device at a time."""
    words = ("--socket", one.socket, "--programs", str(programs), "--threads", str(threads))
    one_user = User(uid, "swapping_user.py", words)
    try:
        if one_user.line(_START_S) is None:
            raise RuntimeError("the user's programs do not get the device")
        yield one_user
    finally:
        one_user.end()


@contextmanager
def attacking(
    socket: str, *names: str, uid: int = ATTACKERS[0], begun: bool = True
) -> Iterator[dict[str, dict[str, Any]]]:
    """Let one user attack until the block ends; then the dictionary has each attack's results. `begun`: wait until all have started."""
    got: dict[str, dict[str, Any]] = {}
    process = _Program(uid, "attacks.py", [*names, "--socket", socket])
    try:
        for _ in names if begun else ():
            if process.line(_START_S) is None:
                raise RuntimeError(f"of {', '.join(names)} not all began")
        yield got
        process.hang_up()
        while len(got) < len(names) and (line := process.line(DEADLINE_S)) is not None:
            if line.startswith("{"):
                tally = json.loads(line)
                got[tally.pop("name")] = tally
    finally:
        process.end()
