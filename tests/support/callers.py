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
_IMPORTS = "import errno, json, os, socket, subprocess, sys, time"  # not http.client: it takes longer than all of these
_PROGRAM = """
def ask(method, path, token, body):
    global line
    head = "%s %s HTTP/1.1\\r\\nHost: broker\\r\\nContent-Length: %d\\r\\n" % (method, path, len(body))
    head += "Authorization: Bearer %s\\r\\n" % token if token else ""
    line = None  # the one before stays open until here
    line = socket.socket(socket.AF_UNIX); line.settimeout(60)
    while line.connect_ex({socket!r}) == errno.EAGAIN:  # a full backlog, as our client does it
        time.sleep(0.02)
    try:
        line.sendall(head.encode() + b"\\r\\n" + body)
    except BrokenPipeError:
        pass  # turned away before it could ask: the reply is there
    with line.makefile("rb") as reply:
        status = int(reply.readline().split()[1])
        fields = dict(field.lower().split(b":", 1) for field in iter(lambda: reply.readline().strip(), b""))
        return status, json.loads(reply.read(int(fields[b"content-length"])))
def attach(pid):
    with open("/proc/%s/stat" % pid) as stat, open("/proc/sys/kernel/random/boot_id") as boot:
        start = int(stat.read().rpartition(")")[2].split()[19])
        ports = {{"transport": "tcp", "ip": "127.0.0.1", "iopub_port": 9999, "shell_port": 9999, "key": "k"}}
        return {{"pid": pid, "start_time": start, "boot_id": boot.read().strip(), "connection": ports}}
children = []
print("ready", flush=True)
for words in sys.stdin:
    method, path, token, body = json.loads(words)
    if method == "START":
        child = [sys.executable, "-S", "-c", "print(flush=True); open(0).read()"]
        environment = {{"JUPYTER_GPU_LEASE": path, "PATH": os.environ["PATH"]}}
        children.append(subprocess.Popen(child, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        children[-1].stdout.readline()
        print(json.dumps([200, attach(children[-1].pid)]), flush=True)
        continue
    print(json.dumps(ask(method, path, token, json.dumps(body).encode())), flush=True)
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
