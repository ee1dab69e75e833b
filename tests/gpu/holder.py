"""A process of the benchmark that holds device memory and obeys commands, one JSON object a line.

    python -P -m tests.gpu.holder torch|driver|init|simulated [--small-pages]

`{"do": "hold", "mib": N, "cached_mib": M}` fills N MiB, and leaves M MiB with the allocator's cache; `{"do": "shrink"}` gives caches back
as the kernel's extension does; `{"do": "check"}` says whether every byte is there; `{"do": "copy", "mib": N}` measures copies between
pinned host memory and the device. Each is answered by one object, `{"error": ...}` where it failed. It ends with its standard input.

`torch` holds tensors, `driver` plain memory of the driver, `init` calls `cuInit` and makes no context. `--small-pages` keeps the kernel
from giving this process huge pages. What else a kind can do is in its `also`.
"""

import ctypes
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

__all__ = ["main"]

_COPIES: Final = 5
_SEED: Final = 17
_PR_SET_THP_DISABLE: Final = 41


class _Holding(Protocol):
    also: Mapping[str, Callable[..., dict[str, Any]]]

    def hold(self, mib: int, cached_mib: int) -> None: ...
    def is_intact(self) -> bool: ...
    def copy(self, mib: int) -> dict[str, float]: ...


class _Torch:
    """Holds tensors."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.parts: list[Any] = []
        self.profiler: Any = None
        self.also: Mapping[str, Callable[..., dict[str, Any]]] = {"stage": self._stage, "profile": self._profile}

    def _noise(self, number: int, mib: int) -> Any:  # noqa: ANN401 - a tensor
        generator = self.torch.Generator(device="cuda").manual_seed(_SEED + number)
        return self.torch.randint(-(2**62), 2**62, (mib << 17,), device="cuda", generator=generator)

    def hold(self, mib: int, cached_mib: int) -> None:
        self.parts.clear()
        self.torch.cuda.empty_cache()
        # In parts of 1 GiB, so that looking at one later needs little room next to them.
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

    def _stage(self, name: str) -> dict[str, Any]:
        """Load one more library's modules into the context. Returns what torch counts as its own, MiB."""
        torch = self.torch
        if name == "zeros":
            torch.zeros(1, device="cuda")
        elif name == "cublas":
            for kind in (torch.float32, torch.bfloat16):
                one = torch.randn(512, 512, device="cuda", dtype=kind)
                one @ one
        elif name == "cudnn":
            torch.nn.functional.conv2d(torch.randn(4, 8, 32, 32, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda"))
        elif name == "compiled":
            torch.compile(lambda one: torch.relu(one) * 2 + 1)(torch.randn(1 << 16, device="cuda"))
        else:
            raise ValueError(f"there is no stage {name!r}")
        torch.cuda.synchronize()
        return {"reserved_mib": round(torch.cuda.memory_reserved() / 2**20, 1)}

    def _profile(self, on: bool) -> dict[str, Any]:
        """Begin or end a profile of the device's work."""
        if on:
            kinds = self.torch.profiler.ProfilerActivity
            self.profiler = self.torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
            self.profiler.start()
            self._stage("cublas")
            return {}
        self.profiler.stop()
        return {"events": len(self.profiler.events())}

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
        self.cuda: Any = importlib.import_module("fractional_gpu.gpu.simulated.cuda")
        self.buffer: Any = None
        self.digest = ""
        self.filling: list[Any] = []
        self.also: Mapping[str, Callable[..., dict[str, Any]]] = {"fill_up": self._fill_up, "release": self._release}

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

    def _fill_up(self, leave_mib: float) -> dict[str, Any]:
        """Allocate until only so much is free on the device."""
        left = int(self.cuda.memory_info()[0]) - int(leave_mib * 2**20)
        if left > 0:
            self.filling.append(self.cuda.allocate(left))
        return {"free_mib": round(self.cuda.memory_info()[0] / 2**20, 1)}

    def _release(self) -> dict[str, Any]:
        for buffer in self.filling:
            buffer.free()
        self.filling.clear()
        return {}


def _driver(*, context: bool) -> _Holding:
    from tests.gpu.holder_driver import DriverHolding  # noqa: PLC0415 - the others need no bindings

    return DriverHolding(context=context)


def main(arguments: list[str]) -> int:
    """Serve until standard input ends; 1 if the device cannot be used, 2 for wrong arguments."""
    kinds: Mapping[str, Callable[[], _Holding]] = {
        "torch": _Torch,
        "driver": lambda: _driver(context=True),
        "init": lambda: _driver(context=False),
        "simulated": _Simulated,
    }
    small_pages = arguments[1:] == ["--small-pages"]
    if not arguments or arguments[0] not in kinds or (arguments[1:] and not small_pages):
        sys.stderr.write(f"usage: python -P -m tests.gpu.holder {'|'.join(kinds)} [--small-pages]\n")
        return 2
    if small_pages:
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        holding = kinds[arguments[0]]()
    except (RuntimeError, ImportError) as error:
        _say({"error": f"{type(error).__name__}: {error}"})
        return 1
    for line in sys.stdin:
        _say(_answer(holding, json.loads(line)))
    return 0


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _answer(holding: _Holding, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _act(holding, request)
    except (RuntimeError, AssertionError) as error:  # the driver's and torch's, out of memory among them
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _act(holding: _Holding, request: dict[str, Any]) -> dict[str, Any]:
    match request.pop("do"):
        case "ready":
            return {}
        case "hold":
            holding.hold(request["mib"], request["cached_mib"])
            return {}
        case "shrink":
            from fractional_gpu_kernel.memory import free_caches  # noqa: PLC0415 - only here: elsewhere the kernel's side may be missing

            begun = time.perf_counter()
            did = free_caches()
            return {"did": did, "seconds": time.perf_counter() - begun}
        case "check":
            return {"intact": holding.is_intact()}
        case "copy":
            return dict(holding.copy(request["mib"]))
        case other if other in holding.also:
            return holding.also[other](**request)
        case other:
            raise ValueError(f"there is no {other!r}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
