"""Lists the model servers the broker can ask to release GPU memory, says how to ask them, and parses `c.GPUBroker.yielders`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServer:
    """How to ask a server to release memory.

    The broker sends `body` to `path` in a POST request. If the body contains MODEL, the broker first gets the list of loaded models from
    `loaded`, then sends one request for each.
    """

    title: str
    port: int
    loaded: str = ""
    path: str
    body: str = ""
    wake: str = ""  # if the server only sleeps, the path whose POST wakes it
    loses: str
    commands: tuple[str, ...] = ()  # names of its processes, for when the broker cannot see which process listens


# fmt: off
SERVERS: Final[Mapping[str, ModelServer]] = {
    # https://docs.ollama.com/api/ps and docs/api.md, "Unload a model". A running request ends first.
    "ollama": ModelServer(
        title="Ollama", port=11434, loaded="/api/ps", path="/api/generate", body='{"model": MODEL, "keep_alive": 0}',
        loses="the loaded model: the next request loads it again", commands=("ollama",)),
    # server.py, `post_free`. A running workflow ends first.
    "comfyui": ModelServer(
        title="ComfyUI", port=8188, path="/free", body='{"unload_models": true, "free_memory": true}',
        loses="its models and cached results: the next workflow loads and computes them again"),
    # internal/server/server.go. `GET /unload` is the older form. Models stop at once.
    "llama-swap": ModelServer(
        title="llama-swap", port=8080, path="/api/models/unload",
        loses="running requests, and the loaded models: the next request loads them again", commands=("llama-server",)),
    # vllm/entrypoints/serve/sleep/api_router.py. Without `mode=wait`, running requests are aborted.
    "vllm": ModelServer(
        title="vLLM", port=8000, loaded="/is_sleeping", path="/sleep?level=1&mode=wait", wake="/wake_up",
        loses="its KV cache: it keeps the weights in host memory, and answers no request until it is woken", commands=("VLLM::",)),
}
# fmt: on
_ENTRY: Final = re.compile(
    rf"({'|'.join(SERVERS)})(?:=http://(?:127\.0\.0\.1|localhost)(?::([1-9]\d{{0,4}}))?/?)?", re.ASCII
)


def parse_yielders(value: object) -> tuple[ModelServer, ...]:
    """Return the configured servers. Raises ValueError with a message that describes the allowed values."""
    servers: dict[ModelServer, None] = {}
    for one in value if isinstance(value, (list, tuple)) else [None]:
        if (match := _ENTRY.fullmatch(str(one))) is None or int(match[2] or 1) > 65_535:
            raise ValueError(
                f"expected a list of {', '.join(map(repr, SERVERS))}; for a server on a non-standard port, add an http URL on 127.0.0.1 or "
                "localhost, such as 'ollama=http://127.0.0.1:11500'"
            )
        server = SERVERS[match[1]]
        servers[replace(server, port=int(match[2] or server.port))] = None
    return tuple(servers)
