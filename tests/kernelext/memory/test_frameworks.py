"""The memory in frameworks' allocators is reported only if it is known for all of them, and never guessed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fractional_gpu_kernel.memory import reserved_mib, shrink
from tests.kernelext.parts import a_kernel

MIB = 2**20


def torch(reserved: list[int], *, initialised: bool = True) -> SimpleNamespace:
    cuda = SimpleNamespace(
        is_initialized=lambda: initialised,
        device_count=lambda: len(reserved),
        memory_reserved=lambda index: reserved[index],
        empty_cache=lambda: None,
    )
    return SimpleNamespace(cuda=cuda)


def cupy(total: int) -> SimpleNamespace:
    pool = SimpleNamespace(total_bytes=lambda: total, free_all_blocks=lambda: None)
    return SimpleNamespace(get_default_memory_pool=lambda: pool, get_default_pinned_memory_pool=lambda: pool)


def jax(stats: dict[str, int]) -> SimpleNamespace:
    client = SimpleNamespace(local_devices=lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    return SimpleNamespace(_backends={"cuda": client, "cpu": object()})


@pytest.mark.parametrize(
    ("modules", "held"),
    [
        ({}, None),
        ({"torch": torch([300 * MIB])}, 300),
        ({"torch": torch([300 * MIB, 200 * MIB + 1])}, 501),
        ({"torch": torch([0])}, 0),
        ({"torch": torch([0], initialised=False)}, None),
        ({"cupy": cupy(64 * MIB)}, 64),
        ({"cupy": cupy(0)}, None),
        ({"torch": torch([300 * MIB]), "cupy": cupy(0)}, 300),
        ({"torch": torch([300 * MIB]), "cupy": cupy(64 * MIB)}, 364),
        ({"jax._src.xla_bridge": jax({"pool_bytes": 128 * MIB})}, 128),
        ({"jax._src.xla_bridge": jax({"bytes_in_use": 5})}, None),
        ({"jax._src.xla_bridge": SimpleNamespace(_backends={})}, None),
        ({"torch": torch([MIB]), "jax._src.xla_bridge": jax({"bytes_in_use": 5})}, None),
        ({"torch": torch([MIB]), "tensorflow": ModuleType("tensorflow")}, None),
        ({"torch": torch([MIB]), "rmm": ModuleType("rmm")}, None),
        ({"torch": torch([MIB]), "cuda.bindings": ModuleType("cuda.bindings")}, 1),  # torch 2.13.0 imports it
        ({"torch": ModuleType("torch")}, None),
    ],
)
def test_it_is_the_sum_of_what_is_loaded_or_unknown(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, object], held: int | None
) -> None:
    for name in ("torch", "cupy", "jax._src.xla_bridge", "tensorflow", "rmm", "cuda.bindings", "numba.cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert reserved_mib() == held


def answer(monkeypatch: pytest.MonkeyPatch, held: int | None) -> tuple[str, str]:
    monkeypatch.setattr("fractional_gpu_kernel.memory.reserved_mib", lambda: held)
    monkeypatch.setattr("fractional_gpu_kernel.memory.free_caches", lambda: "gc, torch")
    answers: list[tuple[str, str]] = []

    def schedule(callback: object) -> bool:
        assert callable(callback)
        callback()
        return True

    shrink(a_kernel(on_main_loop=schedule), lambda word, detail: answers.append((word, detail)))
    return answers[0]


def test_it_goes_with_the_answer_that_caches_were_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(monkeypatch, 1234) == ("done", "gc, torch, reserved_mib=1234")
    assert answer(monkeypatch, None) == ("done", "gc, torch")
