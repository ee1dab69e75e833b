"""A whole machine in namespaces: `jupyter gpu setup-machine` as root, and two users who come by ssh and share its simulated device.

`systemctl` is a stand-in that does what systemd does with the unit; everything else is real. Takes root.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fractional_gpu.config.service import STATE
from tests.support.paths import failing
from tests.support.slurm_site import PATH, new_environment
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.promise("workstation")

ALL_KILLS = bool(os.environ.get("JUPYTER_GPU_ALL_KILLS"))
PLACE = "/opt/jupyter-fractional-gpu"
PROGRAM = "/usr/local/bin/jupyter-gpu"
SYSTEMCTL = f"""#!{PLACE}/bin/python
import os, re, select, shlex, signal, socket, subprocess, sys
from pathlib import Path
unit, pid = Path("/etc/systemd/system/jupyter-gpu.service"), Path("/run/unit.pid")
wanted = unit.parent / "multi-user.target.wants" / unit.name
def stop():
    if pid.exists():
        descriptor = os.pidfd_open(int(pid.read_text()))
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        select.select([descriptor], [], [])
        pid.unlink()
with open("/run/systemctl.log", "a") as log:
    print(*sys.argv[1:], file=log)
match sys.argv[1:]:
    case ["enable", unit.name]:
        wanted.parent.mkdir(exist_ok=True)
        wanted.unlink(missing_ok=True)
        wanted.symlink_to(unit)
    case ["restart", unit.name]:
        stop()
        Path("/run/jupyter-gpu").mkdir(mode=0o755, exist_ok=True)
        Path("/var/lib/jupyter-gpu").mkdir(mode=0o700, exist_ok=True)
        command = re.search("^ExecStart=(.*)$", unit.read_text(), re.M)[1] + " --simulate 1x1GiB"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, open("/run/unit.log", "a") as log:
            Path("/run/notify").unlink(missing_ok=True)
            notify.bind("/run/notify")
            notify.settimeout({DEADLINE_S})
            environment = {{"PATH": os.environ["PATH"], "NOTIFY_SOCKET": "/run/notify"}}
            service = subprocess.Popen(shlex.split(command), env=environment, stdout=log, stderr=log, start_new_session=True)
            pid.write_text(str(service.pid))
            assert b"READY=1" in notify.recv(100)
    case ["disable", "--now", unit.name]:
        stop()
        Path("/run/notify").unlink(missing_ok=True)
        wanted.unlink(missing_ok=True)
    case ["daemon-reload"]:
        pass
    case _:
        sys.exit("unknown")
"""
NOTEBOOK = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="fractional-gpu-default-250")
reply = client.execute_interactive("import os; print(os.getuid(), os.environ['JUPYTER_GPU_LEASE'])", timeout=60)
assert reply["content"]["status"] == "ok", reply
print("ready", flush=True)
sys.stdin.readline()
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


class Workstation:
    def __init__(self, folder: Path) -> None:
        places = ("etc", "usr/local", "home", "root")
        for place in places:
            (folder / place).mkdir(parents=True)
            (folder / "work" / place).mkdir(parents=True)
        for place in ("opt", "run/systemd/system", "lib"):
            (folder / place).mkdir(parents=True)
        new_environment(folder / PLACE[1:], Path(PLACE), ours=True)
        script = [
            *(f"mount -t overlay o -o lowerdir=/{one},upperdir={folder}/{one},workdir={folder}/work/{one} /{one}" for one in places),
            f"mount --bind {folder}/opt /opt",
            f"mount --bind {folder}/run /run",
            f"mount --bind {folder}/lib /var/lib",
            "mount -t tmpfs -o mode=1777 none /dev/shm",
            "mount -t tmpfs -o mode=1777 none /tmp",
            "ip link set lo up",
            "echo ready; exec sleep infinity",
        ]  # fmt: skip
        self.systemctl = folder / "usr/local/sbin/systemctl"
        self.systemctl.parent.mkdir()
        self.systemctl.write_text(SYSTEMCTL)
        self.systemctl.chmod(0o755)
        self._started: list[subprocess.Popen[str]] = []
        isolated = ["unshare", "-m", "-n", "-p", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen([*isolated, "sh", "-ec", "; ".join(script)], stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        with self._holder.stdout as out:
            assert out.readline() == "ready\n"
        self._first = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().strip()

    def _words(self, user: str, words: Sequence[str]) -> list[str]:
        become = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        home = "/root" if user == "root" else f"/home/{user}"
        enter = ["nsenter", "-t", self._first, "-m", "-n", "-p", f"--wdns={home}", *become]
        return [*enter, "env", "-i", f"PATH={PATH}", f"HOME={home}", "LC_ALL=C.UTF-8", *words]

    def run(self, user: str, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            self._words(user, words), capture_output=True, text=True, check=False, timeout=4 * DEADLINE_S
        )
        assert done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def ends(self, user: str, *words: str) -> int:
        done = subprocess.run(self._words(user, words), capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    def start(self, user: str, *words: str) -> "subprocess.Popen[str]":
        started = subprocess.Popen(
            self._words(user, words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._started.append(started)
        return started

    def end(self) -> None:
        """End what was started, as at the end of their input."""
        for one in self._started:
            one.communicate("", timeout=DEADLINE_S)
        self._started.clear()

    def leases(self, user: str) -> set[tuple[str, str]]:
        """Return the owners and states of the leases that this user sees."""
        status = json.loads(self.run(user, PROGRAM, "status", "--json"))
        return {(lease["lease"]["spec"]["owner"], lease["lease"]["spec"]["label"]) for lease in status["leases"]}

    def files(self) -> dict[str, str]:
        """Return what the machine's files are, with modes and owners, without what useradd and groupadd keep."""
        prune = f"-path {PLACE} -prune -o -path /run/systemctl.log -prune -o -path /run/unit.log -prune -o"
        find = f"find /etc /usr/local /opt /run /var/lib {prune} -printf '%p %y%m %U:%G %l\\n'"
        sums = "find /etc /usr/local/share/jupyter /usr/local/bin/jupyter-gpu -type f -exec sha256sum {} + 2>/dev/null"
        lines = self.run("root", "sh", "-c", f"{find}; {sums} | sed -E 's/(\\S+)  (.*)/\\2(content) \\1/'").splitlines()
        found = dict(line.split(" ", 1) for line in lines)
        return {path: what for path, what in found.items() if not path.startswith(("/etc/group-", "/etc/gshadow-"))}

    def close(self) -> None:
        self.end()
        self._holder.kill()
        self._holder.wait()


@pytest.fixture(scope="module")
def machine() -> Iterator[Workstation]:
    folder = Path(tempfile.mkdtemp(prefix="jfg-"))
    folder.chmod(0o755)
    made = Workstation(folder)
    try:
        for name in ("ann", "bob"):
            made.run("root", "useradd", "--create-home", "--shell", "/bin/bash", name)
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)


STEPS = 11
"""The group, six files, three commands of systemd, and after the last."""


def test_a_machine_whose_setup_was_killed_at_any_step_is_undone_or_set_up(machine: Workstation) -> None:
    """A sample of the steps; `test_setup_machine` takes all of those that write files."""
    before, complete = machine.files(), dict[str, str]()
    set_up = [f"{PLACE}/bin/jupyter-gpu", "setup-machine", "--share", "1/2"]
    for step in (STEPS + 1, *range(1, STEPS + 1)) if ALL_KILLS else (STEPS + 1, 2, 9):
        machine.run("root", "sh", "-c", f"echo setup-machine {step} kill >/run/failpoints")
        variables = [f"{name}={value}" for name, value in failing(Path("/run/failpoints")).items()]
        assert (machine.ends("root", *variables, *set_up) == 0) == (step > STEPS)
        machine.run("root", "rm", "-f", "/run/failpoints", "/run/failpoints.reached")
        if step > STEPS:
            files = machine.files()
            complete = {path: what for path, what in files.items() if not path.startswith(("/run/", "/var/lib/"))}
        elif step % 2:
            machine.run("root", *set_up)
            assert complete.items() <= machine.files().items()
        machine.run("root", *set_up[:2], "--undo")
        machine.run("root", "rm", "-rf", str(STATE))
        assert machine.files() == before


def test_two_users_share_a_workstation_and_it_is_undone_without_a_trace(machine: Workstation) -> None:
    before = machine.files()
    set_up = [f"{PLACE}/bin/jupyter-gpu", "setup-machine", "--share", "1/4", "--share", "1/2"]
    set_up += ["--pool", 'default={"user_limits": {"leases": 1}}']
    planned = machine.run("root", *set_up, "--dry-run")
    assert machine.files() == before
    for line in ("run groupadd --system gpu-admin", "run systemctl restart jupyter-gpu.service", f"write {PROGRAM}"):
        assert line in planned
    assert "machine is set up" in machine.run("root", *set_up)
    calls = machine.run("root", "cat", "/run/systemctl.log")
    assert "only root" in machine.run("ann", PROGRAM, "setup-machine", code=1)
    assert "Nothing to change" in machine.run("root", PROGRAM, "setup-machine")
    assert machine.run("root", "cat", "/run/systemctl.log") == calls

    notebook = machine.start("ann", f"{PLACE}/bin/python", "-P", "-c", NOTEBOOK)
    assert notebook.stdout is not None
    said = notebook.stdout.readline()
    assert said.startswith(machine.run("ann", "id", "-u").strip()), said
    assert notebook.stdout.readline() == "ready\n"
    script = machine.start(
        "bob", PROGRAM, "run", "--fraction", "1/2", "--name", "bobs", "--", "sh", "-c", "id -un; read line"
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "bob\n"
    assert {owner for owner, _ in machine.leases("root")} == {"ann", "bob"}
    shown = machine.run("root", PROGRAM, "status").splitlines()
    assert {line.split()[-1] for line in shown if " 1/4 " in line or " 1/2 " in line} == {"ann", "bob"}
    assert {owner for owner, _ in machine.leases("ann")} == {"ann"}
    assert machine.leases("bob") == {("bob", "bobs")}
    again = ["run", "--fraction", "1/4", "--", "true"]
    for name in ("ann", "bob"):
        assert f"user {name!r} has 1 of at most 1 kernel" in machine.run(name, PROGRAM, *again, code=1), (
            "the uid is the user"
        )
    assert "only an administrator may" in machine.run("ann", PROGRAM, "drain", "0", code=1)
    machine.run("root", "usermod", "--append", "--groups", "gpu-admin", "ann")
    assert {owner for owner, _ in machine.leases("ann")} == {"ann", "bob"}, "an administrator"

    kept = machine.files()
    assert "would lose their state" in machine.run("root", PROGRAM, "setup-machine", "--undo", code=1)
    assert machine.files() == kept
    machine.end()
    findings = json.loads(machine.run("bob", PROGRAM, "doctor", "--no-try", "--json"))["findings"]
    (ours,) = [one for one in findings if one["check"] == "workstation"]
    assert ours["severity"] == "ok", ours

    machine.run("root", "systemctl", "disable", "--now", "jupyter-gpu.service")
    machine.run("root", "rm", "-r", "/run/jupyter-gpu")
    findings = json.loads(machine.run("bob", PROGRAM, "doctor", "--no-try", "--json", code=1))["findings"]
    (ours,) = [one for one in findings if one["check"] == "broker"]
    start = "sudo systemctl enable --now jupyter-gpu"
    assert (ours["severity"], start in ours["advice"]) == ("error", True), ours
    assert start in machine.run("bob", PROGRAM, "run", "--fraction", "1/4", "--", "true", code=1), (
        "no broker of his own"
    )
    assert f"stay until you remove them: {STATE}" in machine.run("root", PROGRAM, "setup-machine", "--undo")
    machine.run("root", "rm", "-r", str(STATE))
    assert machine.files() == before
