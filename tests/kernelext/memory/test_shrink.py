"""Caches are given back on the idle main loop, or the answer is "busy"."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fractional_gpu_kernel import memory as limits
from fractional_gpu_kernel.memory import free_caches, shrink
from tests.kernelext.parts import a_kernel


class Loop:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def schedule(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return True


class Answers:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.came = threading.Event()

    def __call__(self, word: str, detail: str) -> None:
        assert detail
        self.words.append(word)
        self.came.set()


def test_an_idle_loop_answers_done() -> None:
    loop, answers = Loop(), Answers()
    shrink(a_kernel(on_main_loop=loop.schedule), answers)
    assert answers.words == []
    loop.callbacks.pop()()
    assert answers.words == ["done"]


@pytest.mark.parametrize(("why_not", "word"), [("", "done"), ("it uses managed memory", "managed")])
def test_a_loop_that_waits_for_input_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, why_not: str, word: str
) -> None:
    monkeypatch.setattr("fractional_gpu_kernel.memory.free_caches", lambda: pytest.fail("disturbed"))
    loop, answers = Loop(), Answers()
    shrink(a_kernel(on_main_loop=loop.schedule, why_not=why_not, waiting=("request",)), answers)
    assert answers.words == [word]
    assert loop.callbacks == []


@pytest.mark.promise("race-main-loop")
def test_a_cell_that_has_begun_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fractional_gpu_kernel.memory.free_caches", lambda: pytest.fail("disturbed"))
    loop, answers = Loop(), Answers()
    kernel = a_kernel(on_main_loop=loop.schedule)
    shrink(kernel, answers)
    kernel.gate.open({})
    kernel.gate.enter("cell")
    loop.callbacks.pop()()
    shrink(kernel, answers)
    assert answers.words == ["busy", "busy"]
    assert loop.callbacks == []


@pytest.mark.promise("race-main-loop")
def test_a_loop_that_is_not_free_in_time_is_busy_and_nothing_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fractional_gpu_kernel.memory.free_caches", lambda: pytest.fail("too late"))
    loop, answers = Loop(), Answers()
    shrink(a_kernel(on_main_loop=loop.schedule), answers, 0.01)
    assert answers.came.wait(60)
    loop.callbacks.pop()()
    assert answers.words == ["busy"]


@pytest.mark.promise("race-main-loop")
@pytest.mark.parametrize(("why_not", "word"), [("", "done"), ("it uses managed memory", "managed")])
def test_a_gui_event_loop_that_runs_no_callback_is_no_reason_to_stay(
    monkeypatch: pytest.MonkeyPatch, why_not: str, word: str
) -> None:
    monkeypatch.setattr("fractional_gpu_kernel.memory.free_caches", lambda: pytest.fail("too late"))
    loop, answers = Loop(), Answers()
    shrink(a_kernel(on_main_loop=loop.schedule, why_not=why_not, has_gui_loop=lambda: True), answers, 0.01)
    assert answers.came.wait(60)
    loop.callbacks.pop()()
    assert answers.words == [word]


def test_a_kernel_without_a_main_loop_has_nothing_to_free() -> None:
    answers = Answers()
    shrink(a_kernel(on_main_loop=lambda _: False), answers)
    assert answers.words == ["done"]


def test_only_loaded_frameworks_that_use_cuda_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    pool = SimpleNamespace(free_all_blocks=lambda: calls.append("cupy"))
    cupy = SimpleNamespace(get_default_memory_pool=lambda: pool, get_default_pinned_memory_pool=lambda: pool)
    cuda = SimpleNamespace(is_initialized=lambda: False, empty_cache=lambda: calls.append("torch"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert free_caches() == "gc, torch, cupy"
    assert calls == ["cupy", "cupy"]
    cuda.is_initialized = lambda: True
    free_caches()
    assert calls[2:] == ["torch", "cupy", "cupy"]


class Cyclic:
    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("package", ["", "torch", "warp"])
def test_garbage_is_collected_where_it_may_hold_device_memory(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in limits._HOLDERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    if package:
        cuda = SimpleNamespace(is_initialized=lambda: False)
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(cuda=cuda))
    gc.collect()
    gc.disable()
    try:
        garbage = weakref.ref(Cyclic())
        free_caches()
        assert (garbage() is None) is bool(package)
    finally:
        gc.enable()


def test_an_error_of_cuda_is_told_and_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: device lost")

    cuda = SimpleNamespace(is_initialized=lambda: True, empty_cache=fail)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    assert free_caches().startswith("gc, torch failed: CUDA error: device lost, cupy failed:")
