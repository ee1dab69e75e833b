"""A process of the benchmark's own that holds device memory and does as it is told, one JSON object a line.

    python -P -m tests.gpu.holder torch|simulated

`{"do": "hold", "mib": N, "cached_mib": M}` fills N MiB, and leaves M MiB with the allocator's cache; `{"do": "shrink"}` gives caches back
as the kernel's extension does; `{"do": "check"}` says whether every byte is there; `{"do": "copy", "mib": N}` measures copies between
pinned host memory and the device. Each is answered by one object. It ends with its standard input.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from kernelext.shrink import free_caches

__all__ = ["main"]

_COPIES: Final = 5
_SEED: Final = 17


class _Holding(Protocol):
    def hold(self, mib: int, cached_mib: int) -> None: ...
    def is_intact(self) -> bool: ...
    def copy(self, mib: int) -> dict[str, float]: ...


class _Torch:
    """Holds tensors."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.parts: list[Any] = []

    def _noise(self, number: int, mib: int) -> Any:  # noqa: ANN401 - a tensor
        generator = self.torch.Generator(device="cuda").manual_seed(_SEED + number)
        return self.torch.randint(-(2**62), 2**62, (mib << 17,), device="cuda", generator=generator)

    def hold(self, mib: int, cached_mib: int) -> None:
        self.parts.clear()
        self.torch.cuda.empty_cache()
        # In parts of 1 GiB, so that looking at one later needs little room beside them.
        sizes = [min(1024, mib - start) for start in range(0, mib, 1024)]
        self.parts += [self._noise(number, size) for number, size in enumerate(sizes)]
        if cached_mib:
            cached = self.torch.empty(cached_mib << 20, dtype=self.torch.uint8, device="cuda").fill_(1)
            del cached
        self.torch.cuda.synchronize()

    def is_intact(self) -> bool:
        same = all(
            bool(self.torch.equal(part, self._noise(number, part.numel() >> 17)))
            for number, part in enumerate(self.parts)
        )
        self.torch.cuda.empty_cache()
        return same

    def copy(self, mib: int) -> dict[str, float]:
        host = self.torch.empty(mib << 20, dtype=self.torch.uint8).pin_memory()
        device = self.torch.empty(mib << 20, dtype=self.torch.uint8, device="cuda")
        return {
            "to_device_s": self._fastest(lambda: device.copy_(host, non_blocking=True)),
            "to_host_s": self._fastest(lambda: host.copy_(device, non_blocking=True)),
        }

    def _fastest(self, act: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(_COPIES):
            self.torch.cuda.synchronize()
            begun = time.perf_counter()
            act()
            self.torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begun)
        return best


class _Simulated:
    """Holds buffers; a simulated device has no caching allocator and no pinned memory, so those parts are plain."""

    def __init__(self) -> None:
        self.cuda: Any = importlib.import_module("provisioner.gpu.simulated.cuda")
        self.buffer: Any = None
        self.digest = ""

    def hold(self, mib: int, cached_mib: int) -> None:
        if self.buffer is not None:
            self.buffer.free()
        if cached_mib:
            self.cuda.allocate(cached_mib << 20).free()
        self.buffer = self.cuda.allocate(mib << 20)
        self.buffer.fill(bytes(range(1, 252)))
        self.digest = self.buffer.sha256()

    def is_intact(self) -> bool:
        return bool(self.buffer.sha256() == self.digest)

    def copy(self, mib: int) -> dict[str, float]:
        data = bytes(mib << 20)
        with self.cuda.allocate(len(data)) as buffer:
            begun = time.perf_counter()
            buffer.write(data)
            between = time.perf_counter()
            buffer.read()
            ended = time.perf_counter()
        return {"to_device_s": between - begun, "to_host_s": ended - between}


def main(arguments: list[str]) -> int:
    """Serve until standard input ends; 2 for arguments that are not understood."""
    kinds: Mapping[str, Callable[[], _Holding]] = {"torch": _Torch, "simulated": _Simulated}
    if len(arguments) != 1 or arguments[0] not in kinds:
        sys.stderr.write("usage: python -P -m tests.gpu.holder torch|simulated\n")
        return 2
    holding = kinds[arguments[0]]()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(holding, json.loads(line))) + "\n")
        sys.stdout.flush()
    return 0


def _answer(holding: _Holding, request: Mapping[str, Any]) -> dict[str, Any]:
    match request["do"]:
        case "hold":
            holding.hold(request["mib"], request["cached_mib"])
            return {}
        case "shrink":
            begun = time.perf_counter()
            did = free_caches()
            return {"did": did, "seconds": time.perf_counter() - begun}
        case "check":
            return {"intact": holding.is_intact()}
        case "copy":
            return dict(holding.copy(request["mib"]))
        case other:
            raise ValueError(f"there is no {other!r}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
