"""What a hostile user of the machine does to a broker that serves all users: for tests and benchmarks of what others notice of it.

    python attacks.py NAME[:SIZE] [NAME[:SIZE] ...] --socket PATH

Each attack is a process, in one session for all of them. It prints `attacking` once it is under way and continues until its standard input
ends; then it prints what it got, one JSON object. SIZE is explained at each attack; `ATTACKS` has the defaults.

Needs no privileges, and only the standard library and pyzmq (for `iopub`): any user can run it who can read this file.
"""

import argparse
import ctypes
import hmac
import http.client
import json
import mmap
import os
import re
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["ATTACKS"]

_PATIENCE_S: Final = 120.0
_PAUSE_S: Final = 0.1
_CONNECTS_AT_ONCE: Final = 50
_LEASES: Final = 60
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3})")
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14  # linux/prctl.h
_ZEROS: Final = "[" + ",".join(["[" + ",".join(["0"] * 4090) + "]"] * 32) + "]"
"""Just below the largest body and the longest list that the broker takes."""
_PORTS: Final = {"transport": "tcp", "ip": "127.0.0.1", "key": "key"}


class RefusedError(OSError):
    """The broker refused what an attack needs for its start."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("broker")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_PATIENCE_S)
        while True:
            try:
                self.sock.connect(self._path)
                break
            except BlockingIOError:  # the backlog is full
                time.sleep(_PAUSE_S / 10)


class Target:
    def __init__(self, path: str) -> None:
        self.path = path
        self.tally: Counter[str] = Counter()
        self._children: list[subprocess.Popen[bytes]] = []
        self.begun = False

    def begin(self) -> None:
        if not self.begun:
            self.begun = True
            _write("attacking")

    def call(self, method: str, path: str, body: object = None, token: str = "") -> dict[str, Any]:
        connection = _Connection(self.path)
        try:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            reply = connection.getresponse()
            text = reply.read()
        finally:
            connection.close()
        self.tally[str(reply.status)] += 1
        decoded: dict[str, Any] = json.loads(text.splitlines()[-1])
        if reply.status >= http.HTTPStatus.BAD_REQUEST:
            raise RefusedError(f"{method} {path}: {decoded}")
        return decoded

    def lease(self, **fields: object) -> tuple[str, str]:
        reply = self.call("POST", "/v1/leases", {"fraction_milli": 125, "memory_mib": 1, **fields})
        return reply["lease_id"], reply["token"]

    def attach(self, lease: str, token: str, pid: int, **fields: object) -> None:
        start_time = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        process = {"pid": pid, "start_time": start_time, "boot_id": boot_id, "connection": {}, **fields}
        self.call("POST", f"/v1/leases/{lease}/attach", process, token)

    def child(self, lease: str) -> int:
        environment = {"JUPYTER_GPU_LEASE": lease}
        self._children.append(subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, env=environment))
        return self._children[-1].pid


Attack = Callable[[Target, int], None]


# -- connections -------------------------------------------------------------------------------------------------------


class _Line:
    def __init__(self, sock: socket.socket, head: bytes) -> None:
        self.sock = sock
        self.events = select.EPOLLOUT
        self._left = memoryview(head)

    def turn(self, target: Target, events: int, again: bytes, piece: bytes) -> int:
        """Read and write what is possible; return the events to wait for next, except reading. Raises OSError at the end."""
        with suppress(BlockingIOError):
            if events & ~select.EPOLLOUT:
                got = self.sock.recv(1 << 16)
                statuses = _STATUS.findall(got)
                target.tally.update(status.decode() for status in statuses)
                if not got:
                    raise ConnectionResetError
                if statuses and again:
                    self._left = memoryview(again)
            self._left = self._left or memoryview(piece)
            if self._left:
                self._left = self._left[self.sock.send(self._left) :]
        return select.EPOLLOUT if self._left or piece else 0


def flood(
    target: Target, lines: int, head: bytes, *, again: bytes = b"", piece: bytes = b"", reads: bool = True
) -> None:
    """Keep this many connections, forever. Each sends `head`, then `again` after each reply or `piece` whenever it can."""
    poll, open_lines = select.epoll(), dict[int, _Line]()
    target.begin()
    while True:
        for _ in range(min(_CONNECTS_AT_ONCE, lines - len(open_lines))):
            sock = _connected(target.path)
            if sock is None:
                break
            target.tally["connected"] += 1
            line = open_lines[sock.fileno()] = _Line(sock, head)
            poll.register(sock, line.events)
        for number, events in poll.poll(_PAUSE_S):
            line = open_lines[number]
            try:
                wanted = line.turn(target, events, again, piece) | reads * select.EPOLLIN
            except OSError:
                target.tally["closed"] += 1
                del open_lines[number]
                line.sock.close()
                continue
            if wanted != line.events:
                line.events = wanted
                poll.modify(number, wanted)


def _connected(path: str) -> socket.socket | None:
    """Return a new non-blocking connection; None if there is no room for it, or no broker."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return sock


def _request(method: str, path: str, body: str = "", token: str = "") -> bytes:
    authorization = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"{method} {path} HTTP/1.1\r\nHost: b\r\n{authorization}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def asking(method: str, path: str, body: str = "") -> Attack:
    """Return the attack of SIZE connections that send this request again as soon as it is answered."""
    request = _request(method, path, body)
    return lambda target, lines: flood(target, lines, request, again=request)


def pouring(head: bytes, piece: bytes) -> Attack:
    """Return the attack of SIZE connections that send `head`, and then `piece` without end."""
    return lambda target, lines: flood(target, lines, head, piece=piece)


def json_attaches(target: Target, lines: int) -> None:
    """SIZE requests at once to attach a process whose connection is lists of zeros."""
    lease, token = target.lease()
    body = f'{{"pid": 1, "start_time": 1, "boot_id": "", "connection": {{"x": {_ZEROS}}}}}'
    request = _request("POST", f"/v1/leases/{lease}/attach", body, token)
    flood(target, lines, request, again=request)


def others(target: Target, lines: int) -> None:
    """SIZE connections that read others' use of a device on which this user has a lease."""
    lease, token = target.lease(kind="command", gated=False)
    target.attach(lease, token, target.child(lease), kind="command")
    target.call("POST", f"/v1/leases/{lease}/acquire", {}, token)
    request = _request("GET", f"/v1/leases/{lease}/others?last_ms=1000")
    flood(target, lines, request, again=request)


def connects(target: Target, lines: int) -> None:
    """SIZE connections opened and closed at once, again and again."""
    target.begin()
    while True:
        made = [sock for _ in range(lines) if (sock := _connected(target.path)) is not None]
        target.tally["connected"] += len(made)
        for sock in made:
            sock.close()


def events(target: Target, lines: int) -> None:
    """SIZE streams of events that are never read, while leases come and go."""
    threading.Thread(target=_leases_for_ever, args=(target,), daemon=True).start()
    flood(target, lines, _request("GET", "/v1/events"), reads=False)


def gates(target: Target, lines: int) -> None:
    """SIZE connections that take a lease's gate from one another, and as many that send unrequested answers."""
    lease, token = target.lease()
    target.attach(lease, token, target.child(lease), connection={**_PORTS, "iopub_port": 65_535, "shell_port": 65_535})
    answer = _request("POST", f"/v1/leases/{lease}/answer", '{"number": 0, "word": "done"}', token)
    threading.Thread(target=flood, args=(target, lines, answer), kwargs={"again": answer}, daemon=True).start()
    hello = '{"version": "1", "open": false, "busy": false}'
    flood(target, lines, _request("POST", f"/v1/leases/{lease}/gate", hello, token))


# -- leases ------------------------------------------------------------------------------------------------------------


def ledger(target: Target, threads: int) -> None:
    """SIZE threads that create leases and delete them."""
    target.begin()
    for _ in range(threads - 1):
        threading.Thread(target=_leases_for_ever, args=(target,), daemon=True).start()
    _leases_for_ever(target)


def _leases_for_ever(target: Target) -> None:
    while True:
        try:
            lease, _ = target.lease(label="x" * 200, kernel_id="k" * 200)
            target.call("DELETE", f"/v1/leases/{lease}")
            target.tally["leases"] += 1
        except (OSError, http.client.HTTPException):
            time.sleep(_PAUSE_S)


def iopub(target: Target, size: int) -> None:
    """Leases that all listen to one socket, with messages of SIZE bytes, signed as slowly as the broker allows."""
    import zmq  # noqa: PLC0415 - no other attack needs it

    context = zmq.Context()
    publisher, shell = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    publisher.sndhwm = 8  # for each subscriber: what is too slow loses messages
    ports = [int(one.bind_to_random_port("tcp://127.0.0.1")) for one in (publisher, shell)]
    schemes = ["sha512", "sha3_512"]  # the slowest last
    for _ in range(_LEASES):
        lease, token = target.lease()
        connection = {**_PORTS, "iopub_port": ports[0], "shell_port": ports[1]}
        child = target.child(lease)
        while True:
            try:
                target.attach(lease, token, child, connection={**connection, "signature_scheme": f"hmac-{schemes[-1]}"})
                break
            except RefusedError:
                if len(schemes) == 1:
                    raise
                schemes.pop()
    scheme = schemes[-1]
    target.tally[scheme] = _LEASES
    parts = [b'{"msg_type": "stream", "msg_id": "x"}', b"{}", b"{}", b'{"text": "' + b"x" * size + b'"}']
    signature = hmac.new(b"key", b"".join(parts), scheme).hexdigest().encode()
    message = [b"kernel.x.stream", b"<IDS|MSG>", signature, *parts]
    target.begin()
    while True:
        publisher.send_multipart(message, copy=False)
        target.tally["published"] += 1


# -- environments ------------------------------------------------------------------------------------------------------


def environ(target: Target, mib: int) -> None:
    """A process whose environment has SIZE MiB, and that does nothing else."""
    _ = _large_environment(mib)
    target.begin()
    threading.Event().wait()


def environ_lease(target: Target, mib: int) -> None:
    """A process with such an environment that attaches itself to its own leases (SIZE 0: 4 GiB, or 1 GiB on a small machine)."""
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = _large_environment(mib or (4096 if free_bytes > 16 << 30 else 1024))
    target.begin()
    while True:
        lease, token = target.lease(kind="command", gated=False)
        variable = f"JUPYTER_GPU_LEASE={lease}\0".encode()
        memory[: len(variable)] = variable
        target.attach(lease, token, os.getpid(), kind="command")
        target.tally["attached"] += 1
        target.call("DELETE", f"/v1/leases/{lease}")


def _large_environment(mib: int) -> mmap.mmap:
    """Return memory that /proc shows as this process's environment from now on (PR_SET_MM_MAP needs no privileges)."""
    memory = mmap.mmap(-1, mib << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # /proc shows private memory only
    for start in range(0, len(memory), 1 << 20):
        memory[start : start + (1 << 20)] = b"x" * (1 << 20)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    fields = [int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    start_code, end_code, start_stack = fields[22:25]
    start_data, end_data, start_brk, arg_start, arg_end = fields[41:46]
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    layout = (start_code, end_code, start_data, end_data, start_brk, libc.sbrk(0), start_stack, arg_start, arg_end)
    packed = struct.pack("12Q2I", *layout, address, address + len(memory), 0, 0, 0xFFFFFFFF)  # no auxv, no other exe
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, packed, ctypes.c_ulong(len(packed)), ctypes.c_ulong(0)):
        raise RuntimeError(f"the environment cannot be enlarged: {os.strerror(ctypes.get_errno())}")
    return memory


def spin(target: Target, _size: int) -> None:
    """No attack: it computes, to compare with the scheduler's effect alone."""
    target.begin()
    while True:
        pass


_CHUNKED: Final = b"POST /v1/leases HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\n"
ATTACKS: Final[dict[str, tuple[Attack, int]]] = {
    "spin": (spin, 1),
    "environ": (environ, 200),
    "environ-lease": (environ_lease, 0),
    "slow-bodies": (pouring(_CHUNKED, b"1\r\n \r\n" * 500), 1900),  # in chunks of a byte
    "json": (asking("POST", "/v1/leases", f'{{"fraction_milli": 125, "label": {_ZEROS}}}'), 1000),
    "json-attach": (json_attaches, 200),
    "iopub": (iopub, 1_000_000),
    "capacity": (asking("GET", "/v1/capacity"), 400),
    "refused": (asking("GET", "/v1/ping"), 400),  # more than a user may ask
    "others": (others, 400),
    "ledger": (ledger, 4),
    "connects": (connects, 100),
    "heads": (pouring(b"GET /v1/ping HTTP/1.1\r\nX: ", b"x"), 400),  # byte by byte
    "pipelined": (pouring(b"", _request("GET", "/v1/ping") * 50), 50),
    "gates": (gates, 200),
    "events": (events, 400),
}
"""Each attack with its default SIZE."""


def _run(target: Target, attack: Attack, size: int) -> None:
    """Attack forever: what the broker refuses or breaks off is retried."""
    while True:
        try:
            attack(target, size)
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            target.tally[f"failed: {error}"[:160]] += 1
            time.sleep(_PAUSE_S)


def _write(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME[:SIZE]")
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    (name, *others), child = options.names, 0
    while others and not (child := os.fork()):  # each attack's process is the child of the one before
        name, *others = others
    target = Target(options.socket)
    attack, default = ATTACKS[name.partition(":")[0]]
    size = int(name.partition(":")[2] or default)
    threading.Thread(target=_run, args=(target, attack, size), daemon=True).start()
    sys.stdin.read()
    _write(json.dumps({"name": name, "begun": target.begun, **dict(target.tally)}))
    if child:
        os.waitpid(child, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
