"""Blocking work in a separate thread: what it returns and raises, forks, and exits of the interpreter."""

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from fractional_gpu.client.threads import in_thread


async def test_it_returns_what_the_work_returns_and_raises_what_it_raises() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)


async def test_the_work_sees_the_callers_context_and_runs_outside_the_loop() -> None:
    said = contextvars.ContextVar[str]("said")
    said.set("by the caller")
    go = threading.Event()

    def work() -> tuple[str, int]:
        assert go.wait(30)
        return said.get(), threading.get_ident()

    asyncio.get_running_loop().call_soon(go.set)  # never runs if the loop waits for the work
    text, thread = await in_thread(work)
    assert text == "by the caller"
    assert thread != threading.get_ident()


async def test_cancelled_it_returns_at_once_and_the_work_goes_on() -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert go.wait(30)
        ended.set()
        raise ValueError("this is not awaited any more")

    task = asyncio.create_task(in_thread(work))
    while not began.is_set():  # noqa: ASYNC110 - the thread has no way into this loop
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    go.set()
    assert ended.wait(30)


_FORKED = """
import asyncio, os, sys
from fractional_gpu.client.threads import in_thread
loop = asyncio.new_event_loop()
assert loop.run_until_complete(in_thread(int, "1")) == 1
children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        for turn in range(50):
            assert loop.run_until_complete(in_thread(int, str(turn))) == turn
        os._exit(0)
    children.append(child)
for turn in range(50):
    assert loop.run_until_complete(in_thread(int, str(turn))) == turn
print([os.waitpid(child, 0)[1] for child in children])
loop.close()
"""

_AT_EXIT = """
import asyncio, atexit
from fractional_gpu.client.threads import in_thread
loop = asyncio.new_event_loop()
loop.run_until_complete(in_thread(int, "1"))
def late():
    print(loop.run_until_complete(in_thread(int, "2")))
    loop.close()
atexit.register(late)
"""


@pytest.mark.parametrize(("program", "printed"), [(_FORKED, "[0, 0, 0, 0]"), (_AT_EXIT, "2")], ids=["fork", "atexit"])
def test_a_loop_that_was_used_before_goes_on_in_children_and_at_exit(program: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == (printed, 0), done.stderr
