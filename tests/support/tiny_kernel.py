"""A Jupyter kernel that is not ipykernel: it only executes Python. Our extension cannot be loaded into it.

Run as a program with the connection file as its argument. Its main thread does everything but the heartbeat, so it is deaf, even to a
shutdown request, while a cell runs or is blocked.
"""

import contextlib
import hashlib
import hmac
import io
import json
import sys
import threading
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import zmq

DELIMITER = b"<IDS|MSG>"
INFO = {
    "status": "ok",
    "protocol_version": "5.3",
    "implementation": "tiny",
    "implementation_version": "1",
    "banner": "tiny",
    "language_info": {"name": "tiny", "version": "1", "mimetype": "text/x-tiny", "file_extension": ".tiny"},
    "help_links": [],
}


class TinyKernel:
    def __init__(self, connection: dict[str, Any]) -> None:
        self.key, self.session = connection["key"].encode(), uuid.uuid4().hex
        self.names: dict[str, Any] = {}
        self.count = 0
        context = zmq.Context()

        def bound(kind: int, name: str) -> Any:  # noqa: ANN401 - pyzmq is untyped here
            socket = context.socket(kind)
            socket.bind(f"tcp://{connection['ip']}:{connection[name + '_port']}")
            return socket

        self.shell, self.control = bound(zmq.ROUTER, "shell"), bound(zmq.ROUTER, "control")
        self.iopub, self.stdin = bound(zmq.PUB, "iopub"), bound(zmq.ROUTER, "stdin")
        beat = bound(zmq.ROUTER, "hb")
        threading.Thread(target=lambda: zmq.proxy(beat, beat), daemon=True).start()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.shell, zmq.POLLIN)
        poller.register(self.control, zmq.POLLIN)
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # an interrupt between two cells
                for socket, _ in poller.poll():
                    if self.serve(socket) == "shutdown_request":
                        return

    def serve(self, socket: Any) -> str:  # noqa: ANN401 - as above
        frames = socket.recv_multipart()
        at = frames.index(DELIMITER)
        header, content = json.loads(frames[at + 2]), json.loads(frames[at + 5])
        kind = str(header["msg_type"])
        self.send(self.iopub, [b"tiny.status"], "status", header, {"execution_state": "busy"})
        answer: dict[str, Any] = {"status": "ok"}
        match kind:
            case "kernel_info_request":
                answer = INFO
            case "execute_request":
                answer = self.execute(header, content["code"])
            case "shutdown_request":
                answer["restart"] = content["restart"]
        self.send(socket, frames[:at], kind.replace("_request", "_reply"), header, answer)
        self.send(self.iopub, [b"tiny.status"], "status", header, {"execution_state": "idle"})
        return kind

    def execute(self, parent: dict[str, Any], code: str) -> dict[str, Any]:
        self.count += 1
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, self.names)  # noqa: S102 - a kernel's whole purpose
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - as above: whatever a cell raises is its answer
            return {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": []}
        if printed.getvalue():
            self.send(self.iopub, [b"tiny.stream"], "stream", parent, {"name": "stdout", "text": printed.getvalue()})
        return {"status": "ok", "execution_count": self.count, "user_expressions": {}, "payload": []}

    def send(self, socket: Any, to: list[bytes], kind: str, parent: dict[str, Any], content: dict[str, Any]) -> None:  # noqa: ANN401
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": kind,
            "session": self.session,
            "username": "tiny",
            "date": datetime.now(UTC).isoformat(),
            "version": "5.3",
        }
        parts = [json.dumps(part).encode() for part in (header, parent, {}, content)]
        signature = hmac.new(self.key, b"".join(parts), hashlib.sha256).hexdigest().encode()
        socket.send_multipart([*to, DELIMITER, signature, *parts])


if __name__ == "__main__":
    TinyKernel(json.loads(Path(sys.argv[1]).read_text())).run()
