"""Processes that call a broker on behalf of a test: as other users, in other control groups, in other namespaces."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["Caller", "caller"]

# Sends what its input says, a line for each request, and prints the replies. It also starts processes with a lease's id.
# Where the interpreter lies, perhaps only the test's user may read: these are loaded first.
_IMPORTS = "import errno, json, http.client, os, socket, subprocess, sys, time"
_PROGRAM = """
class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.settimeout(60)
        while self.sock.connect_ex({socket!r}) == errno.EAGAIN:  # a full backlog, as our client does it
            time.sleep(0.02)
def attach(pid):
    with open("/proc/%s/stat" % pid) as stat, open("/proc/sys/kernel/random/boot_id") as boot:
        start = int(stat.read().rpartition(")")[2].split()[19])
        ports = {{"transport": "tcp", "ip": "127.0.0.1", "iopub_port": 9999, "shell_port": 9999, "key": "k"}}
        return {{"pid": pid, "start_time": start, "boot_id": boot.read().strip(), "connection": ports}}
children = []
print("ready", flush=True)
for line in sys.stdin:
    method, path, token, body = json.loads(line)
    if method == "START":
        child = [sys.executable, "-S", "-c", "print(flush=True); open(0).read()"]
        environment = {{"JUPYTER_GPU_LEASE": path, "PATH": os.environ["PATH"]}}
        children.append(subprocess.Popen(child, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        children[-1].stdout.readline()
        print(json.dumps([200, attach(children[-1].pid)]), flush=True)
        continue
    connection = Connection("broker")
    try:
        connection.request(method, path, json.dumps(body), {{"Authorization": "Bearer " + token}} if token else {{}})
    except BrokenPipeError:
        pass  # turned away before it could ask: the reply is there
    reply = connection.getresponse()
    print(json.dumps([reply.status, json.loads(reply.read())]), flush=True)
for child in children:
    child.kill()
"""


class Caller:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def call(self, method: str, path: str, token: str = "", body: object = None) -> tuple[int, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, path, token, body]) + "\n")
        self._process.stdin.flush()
        status, reply = json.loads(self._process.stdout.readline())
        return status, reply

    def start_for(self, lease_id: str) -> dict[str, Any]:
        """Start a process for the lease below the caller; return its true attach request, as seen there."""
        _, fields = self.call("START", lease_id)
        assert isinstance(fields, dict)
        return fields


@contextmanager
def caller(socket: str, *, first: str = "", through: Sequence[str] = ()) -> Iterator[Caller]:
    """A caller, which ends with the block. `first`: what its program does before anything else; `through`: the command that starts it."""
    program = f"{_IMPORTS}\n{first}\n{_PROGRAM.format(socket=socket)}"
    with subprocess.Popen(
        [*through, sys.executable, "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield Caller(process)
            process.communicate()
        finally:
            process.kill()
