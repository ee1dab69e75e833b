"""A torch kernel with everything that a notebook may hold is suspended and resumed, and notices nothing.

Live tensors, a model with its optimizer's state, a CUDA graph, pinned host memory, a running thread, and a child process with a separate
context.
"""

from collections.abc import Callable

from tests.gpu.cells import TorchCells
from tests.gpu.kernels import Kernel
from tests.gpu.lab import Lab

Note = Callable[[str, object], None]

TIMES = 3
TRAIN = """
torch.manual_seed(11)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 16)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, targets = torch.randn(256, 1024, device="cuda"), torch.randn(256, 16, device="cuda")
def step():
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()
def snapshot():
    tensors = [*model.parameters(), *(value for one in optimizer.state.values() for value in one.values())]
    return [tensor.detach().cpu().clone() for tensor in tensors]
losses = [step() for _ in range(5)]
before = snapshot()
"""
GRAPH = """
static_in = torch.zeros(1 << 16, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        static_out = static_in * 3 + 1
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    static_out = static_in * 3 + 1
def replayed(value):
    static_in.fill_(value)
    graph.replay()
    torch.cuda.synchronize()
    return bool((static_out == value * 3 + 1).all())
assert replayed(2.0)
"""
PINNED = """
pinned = torch.arange(1 << 20).pin_memory()
pinned_at = pinned.data_ptr()
"""
THREAD = """
import queue, threading
questions, answers, stop, ticks = queue.Queue(), queue.Queue(), threading.Event(), [0]
def count():
    while not stop.wait(0.01):
        ticks[0] += 1
def compute():
    mine = torch.full((1 << 16,), 5.0, device="cuda")
    while (factor := questions.get()) is not None:
        answers.put(float((mine * factor).sum().item()))
threads = [threading.Thread(target=count, daemon=True), threading.Thread(target=compute, daemon=True)]
for thread in threads:
    thread.start()
questions.put(2)
assert answers.get(timeout=60) == 10.0 * (1 << 16)
"""
CHILD = '''
import subprocess, sys
child_code = """
import sys, torch
held = torch.arange(1 << 24, device='cuda')
print('ready', flush=True)
for line in sys.stdin:
    print(int(held.sum().item()), flush=True)
"""
child = subprocess.Popen([sys.executable, "-c", child_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "ready\\n"
def ask_child():
    child.stdin.write("\\n")
    child.stdin.flush()
    return int(child.stdout.readline())
assert ask_child() == sum(range(1 << 24))
print(child.pid)
'''
AFTER = """
assert all(torch.equal(one, other) for one, other in zip(before, snapshot(), strict=True)), "model or optimizer differ"
assert replayed({number}.5), "the graph computes something else"
assert pinned.is_pinned() and pinned.data_ptr() == pinned_at, "pinned memory has moved"
assert torch.equal(pinned.cuda(non_blocking=True).cpu(), torch.arange(1 << 20)), "pinned memory differs"
questions.put({number} + 3)
assert answers.get(timeout=60) == 5.0 * ({number} + 3) * (1 << 16), "the thread computes something else"
assert all(thread.is_alive() for thread in threads)
assert ask_child() == sum(range(1 << 24)), "the child's memory differs"
"""
# Losses continue as they would have: the same steps on a copy that was never suspended are not to be had, but they must still fall.
TRAIN_ON = "losses += [step() for _ in range(5)]\nassert losses[-1] < losses[0]\nbefore = snapshot()\n"
END = """
questions.put(None)
stop.set()
for thread in threads:
    thread.join(timeout=60)
child.stdin.close()
assert child.wait(60) == 0
"""


def test_everything_that_a_torch_kernel_holds_survives(lab: Lab, saw: Note) -> None:
    cells = TorchCells()
    with Kernel(lab, lab.install(7)) as kernel:
        kernel.must(cells.fill(21, lab.unit_mib))
        for code in (TRAIN, GRAPH, PINNED, THREAD):
            kernel.must(code)
        child = int(kernel.must(CHILD))
        saw("held_mib", {"kernel": lab.used_by(kernel.pid), "child": lab.used_by(child)})
        assert lab.used_by(child) > 0, "NVML does not count the child: nothing was shown of it"
        for number in range(TIMES):
            ticks = int(kernel.must("print(ticks[0])"))
            lease = kernel.suspend()
            assert lease.state == "suspended"
            assert lab.used_by(kernel.pid, child) == 0, "the kernel or its child holds device memory"
            kernel.resume()
            assert kernel.is_intact()
            kernel.must(AFTER.format(number=number))
            assert int(kernel.must("print(ticks[0])")) > ticks, "the thread stood still"
            kernel.must(TRAIN_ON)
        saw("saved_mib", lease.lease.saved_mib)
        kernel.must(END)


def test_the_cap_holds_whether_torch_comes_before_or_after_the_first_admission(lab: Lab, saw: Note) -> None:
    name = lab.install(3)
    cap_mib = 3 * lab.unit_mib
    for when, first in (
        ("imported in a %%cpu cell before", "%%cpu\nimport torch"),
        ("imported with its first use", "x = 1"),
    ):
        with Kernel(lab, name) as kernel:
            kernel.must(first)
            got_mib = int(kernel.must(lab.cells.grab(128)))
            held = kernel.must("print(torch.cuda.max_memory_reserved() >> 20)")
            saw(when, {"cap_mib": cap_mib, "got_mib": got_mib, "reserved_mib": int(held)})
            assert cap_mib // 2 <= got_mib <= cap_mib
