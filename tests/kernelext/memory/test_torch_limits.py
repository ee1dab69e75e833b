"""On several devices torch is limited only where it is used: no context elsewhere, and the current device stays the same."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fractional_gpu_kernel.memory import MemoryLimits, TorchLimits

GIB = 2**30


class Torch:
    """The parts of torch that limits need. `number_only`: a limit is only a number, as in newer releases.

    Older ones make the device current and ask for its memory, which creates a context there (c10/cuda/CUDACachingAllocator.cpp:
    `SetDevice`, `cudaMemGetInfo`). With CUDA 12 making a device current creates a context, too.
    """

    def __init__(self, devices: int, *, number_only: bool, knows_contexts: bool = True) -> None:
        self.contexts: set[int] = set()
        self.current = 0
        self.fractions: dict[int, float] = {}
        self.reserved = dict.fromkeys(range(devices), 0)
        self.number_only = number_only
        self.fails_on: int | None = None
        self.cuda = SimpleNamespace(
            device_count=lambda: devices,
            current_device=lambda: self.current,
            set_device=self.set_device,
            get_device_properties=lambda _: SimpleNamespace(total_memory=80 * GIB),
            memory_reserved=lambda index: self.reserved[index],
            set_per_process_memory_fraction=self.set_fraction,
            is_initialized=lambda: True,
        )
        self._C = SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index in self.contexts)
        if not knows_contexts:
            self._C = SimpleNamespace()

    def set_device(self, index: int) -> None:
        self.current = index
        self.contexts.add(index)

    def set_fraction(self, fraction: float, index: int) -> None:
        if index == self.fails_on:
            self.set_device(index)
            raise RuntimeError("CUDA error: out of memory")
        if not self.number_only:
            self.set_device(index)
        self.fractions[index] = fraction

    def allocate(self, index: int, n_bytes: int) -> None:
        self.contexts.add(index)
        self.reserved[index] += n_bytes


def limited(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> TorchLimits:
    monkeypatch.setitem(sys.modules, "torch", torch)
    return TorchLimits()


@pytest.mark.parametrize("current", [0, 1, 2])
def test_only_the_current_device_gets_a_context_and_it_stays_current(
    monkeypatch: pytest.MonkeyPatch, current: int
) -> None:
    torch = Torch(3, number_only=False)
    torch.current = current
    limited(torch, monkeypatch).apply(torch, 20 * 1024)
    assert (torch.contexts, torch.current) == ({current}, current)
    assert torch.fractions == {current: 0.25}


def test_another_device_is_limited_once_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(4, number_only=False)
    limits = limited(torch, monkeypatch)
    limits.apply(torch, 20 * 1024)
    assert not limits.is_stale()
    torch.allocate(2, GIB)
    assert limits.is_stale()
    limits.apply(torch, 20 * 1024)
    assert (torch.contexts, torch.current, set(torch.fractions)) == ({0, 2}, 0, {0, 2})
    assert not limits.is_stale()


def test_a_changed_limit_reaches_every_device_that_has_one_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(3, number_only=False)
    limits = limited(torch, monkeypatch)
    limits.apply(torch, 20 * 1024)
    torch.allocate(1, GIB)
    limits.apply(torch, 20 * 1024)
    torch.reserved[1] = 0  # its memory was given back, its context is still there
    limits.apply(torch, 40 * 1024)
    assert torch.fractions == {0: 0.5, 1: 0.5}
    assert (torch.contexts, torch.current) == ({0, 1}, 0)


def test_where_a_limit_is_only_a_number_every_device_has_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(3, number_only=True)
    limits = limited(torch, monkeypatch)
    limits.apply(torch, 20 * 1024)
    assert torch.fractions == {0: 0.25, 1: 0.25, 2: 0.25}
    assert (torch.contexts, torch.current) == (set(), 0)


def test_a_torch_that_cannot_tell_contexts_is_taken_for_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(2, number_only=False, knows_contexts=False)
    limited(torch, monkeypatch).apply(torch, 20 * 1024)
    assert torch.contexts == {0}


def test_a_single_device_is_limited_without_asking_which_one_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(1, number_only=False)
    del torch.cuda.current_device
    limited(torch, monkeypatch).apply(torch, 20 * 1024)
    assert torch.fractions == {0: 0.25}


def test_the_current_device_is_put_back_when_cuda_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(2, number_only=False)
    limits = limited(torch, monkeypatch)
    limits.apply(torch, 20 * 1024)
    torch.allocate(1, GIB)
    torch.fails_on = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        limits.apply(torch, 20 * 1024)
    assert torch.current == 0
    assert limits.is_stale(), "it is tried again before the next cell"


def test_a_device_that_comes_into_use_makes_the_limits_stale_and_counts_as_lowering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch: Any = Torch(2, number_only=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    limits = MemoryLimits({"JUPYTER_GPU_MEMORY_MIB": "20480"})
    limits.torch_imported(torch)
    assert (limits.is_stale, limits.is_lowered) == (False, False)
    torch.allocate(1, GIB)
    assert (limits.is_stale, limits.is_lowered) == (True, True)
    limits.refresh()
    assert (limits.is_stale, set(torch.fractions), torch.current) == (False, {0, 1}, 0)
