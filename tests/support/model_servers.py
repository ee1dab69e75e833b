"""Stub model servers: they answer as Ollama, ComfyUI, llama-swap and vLLM do, record what they are asked, and can misbehave.

    python -P -m tests.support.model_servers KIND PORT DIRECTORY DEVICE MIB DELAY_S

runs one that holds that much memory of a simulated device while its model is loaded, and changes that so long after it has answered. It
says `PORT` on standard output and then each request, and ends with its standard input.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["VRAM", "Asked", "StubServer", "served"]

VRAM = 5_333_539_264
_MODEL = {
    "name": "llama3:latest", "model": "llama3:latest", "size": 6_591_830_464, "digest": "c6eb396dbd59", "size_vram": VRAM,
    "details": {"format": "gguf", "families": ["llama"]}, "expires_at": "2318-01-01T00:00:00Z", "context_length": 4096,
}  # fmt: skip
_ON_CPU = {**_MODEL, "name": "embed:latest", "size_vram": 0}
_UNLOAD = {"model": "llama3:latest", "keep_alive": 0}
_FREE = {"unload_models": True, "free_memory": True}
_UNLOADED = {
    "model": "llama3:latest",
    "created_at": "2026-09-12T03:54:03Z",
    "response": "",
    "done": True,
    "done_reason": "unload",
}

# Before the answer, instead of its body, and instead of its status.
_FIRST = {
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
    "headers": b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000,
    "garbage": bytes(range(256)) * 16,
}
_TEXTS = {
    "nonsense": b'{"models": 3}',
    "deep": b'{"a": ' + b"[" * 60_000,
}
_STATUS = {"refuse": 403, "redirect": 302}

Asked = tuple[str, str, str]
"""Method, path with its query, and body."""


@dataclass
class StubServer:
    """`fault`: hang, drip, huge, lie (it keeps its memory), or one of the tables above. `changed` gets whether the model is loaded."""

    kind: str
    fault: str = ""
    changed: Callable[[bool], None] = lambda _: None
    told: Callable[[Asked], None] = lambda _: None
    loaded: bool = True
    asked: list[Asked] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def answer(self, method: str, path: str, body: str) -> tuple[int, Any]:
        asked = (method, path, body)
        self.asked.append(asked)
        self.told(asked)
        sent = json.loads(body or "{}")
        found: dict[tuple[str, str, str], Callable[[], Any]] = {
            ("ollama", "GET", "/api/ps"): lambda: {"models": [_MODEL, _ON_CPU] if self.loaded else [_ON_CPU]},
            ("ollama", "POST", "/api/generate"): lambda: self._load(sent != _UNLOAD, _UNLOADED),
            ("comfyui", "POST", "/free"): lambda: self._load(sent != _FREE, None),
            ("llama-swap", "POST", "/api/models/unload"): lambda: self._load(False, {"msg": "ok"}),
            ("vllm", "GET", "/is_sleeping"): lambda: {"is_sleeping": not self.loaded},
            ("vllm", "POST", "/sleep?level=1&mode=wait"): lambda: self._load(False, None),
            ("vllm", "POST", "/wake_up"): lambda: self._load(True, None),
        }
        act = found.get((self.kind, method, path))
        return (404, {"detail": "Not Found"}) if act is None else (200, act())

    def _load(self, loaded: bool, answer: Any) -> Any:  # noqa: ANN401 - JSON
        self.loaded = loaded
        if self.fault != "lie":
            self.changed(loaded)
        return answer


@contextmanager
def served(server: StubServer, address: str = "127.0.0.1", port: int = 0) -> Iterator[StubServer]:
    """Serve on a loopback address until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            status, answer = server.answer(self.command, self.path, body)
            text = b"" if answer is None else json.dumps(answer).encode()
            if server.fault == "hang":
                server.over.wait()
            self.wfile.write(_FIRST.get(server.fault, b""))
            text, status = _TEXTS.get(server.fault, text), _STATUS.get(server.fault, status)
            self.send_response(status)
            if server.fault == "redirect":
                self.send_header("Location", f"http://127.0.0.1:{server.port}/elsewhere")
            self.send_header("Content-Length", str(1 << 40 if server.fault == "huge" else len(text)))
            self.end_headers()
            while server.fault in ("huge", "drip") and not server.over.wait(0 if server.fault == "huge" else 0.2):
                self.wfile.write(b" " * (1 << 16 if server.fault == "huge" else 1))
            self.wfile.write(text)

        do_GET = do_POST = _reply  # noqa: N815 - the names of the standard library

        def log_message(self, *_: object) -> None:
            pass

    class Served(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        daemon_threads = False

        def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the library's
            """Ignore that the broker hung up: a server that misbehaves is left."""
            if not isinstance(sys.exception(), OSError):
                super().handle_error(request, client_address)

    with Served((address, port), Handler) as listening:
        server.port = listening.server_port
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            listening.shutdown()
            thread.join()


def main(arguments: list[str]) -> int:
    """Run a server that holds device memory while its model is loaded."""
    from fractional_gpu.gpu.simulated import cuda  # noqa: PLC0415 - a test's own process has no device

    kind, port, folder, device, mib, delay_s = arguments
    for name in ("JUPYTER_GPU_LEASE", "JUPYTER_GPU_MEMORY_MIB"):
        os.environ.pop(name, None)
    os.environ["JUPYTER_GPU_SIMULATED_DIR"], os.environ["JUPYTER_GPU_SIMULATED_DEVICE"] = folder, device
    with ExitStack() as held:

        def load(loaded: bool) -> None:
            held.close()
            if loaded:
                held.enter_context(cuda.allocate(int(mib) << 20))

        def say(asked: Asked) -> None:
            sys.stdout.write(f"{' '.join(asked)}\n")
            sys.stdout.flush()

        def load_later(loaded: bool) -> None:
            threading.Timer(float(delay_s), load, [loaded]).start()

        load(True)
        with served(StubServer(kind, changed=load_later, told=say), port=int(port)) as server:
            sys.stdout.write(f"{server.port}\n")
            sys.stdout.flush()
            sys.stdin.read()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
