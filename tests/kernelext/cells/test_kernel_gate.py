"""How cells of a real kernel pass the gate."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.protocol.messages import GateCommand, GateVerb, Progress
from tests.kernelext.kernels import RunningKernel, kernel_environment, running_kernel
from tests.kernelext.scripted_broker import ScriptedBroker

PROMPT_S = 15.0  # on the slowest machine; nothing else would end the wait


def open_gate(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.stream("gate")
    broker.grant_at_once = True
    assert kernel.run("pass").status == "ok"
    broker.grant_at_once = False


def test_a_cell_waits_is_granted_and_runs_with_the_device_bound(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    request = kernel.send("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    stream = broker.stream("acquire")
    stream.waiting("lease-2 runs a cell on the only GPU.")
    kernel.until_shown(request, "lease-2 runs a cell on the only GPU.")
    stream.granted(CUDA_VISIBLE_DEVICES="GPU-7")
    outcome = kernel.finish(request)
    assert (outcome.status, outcome.printed) == ("ok", "GPU-7\n")
    assert outcome.kinds.index("clear_output") < outcome.kinds.index("stream"), "the line is gone before the output"


def test_what_is_shown_below_a_cell_is_no_result_of_it_to_a_debugger(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    broker.grant_at_once = True
    for code in ("%gpu suspend", "display('a result')"):
        outcome = kernel.run(code)
        kinds = [one["parent_header"]["msg_type"] for one in outcome.published if one["msg_type"] == "display_data"]
        assert kinds == ["display_data" if code.startswith("%gpu") else "execute_request"]


def test_a_grant_at_once_shows_nothing(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.grant_at_once = True
    outcome = kernel.run("1 + 1")
    assert outcome.kinds == ["status", "execute_input", "execute_result", "status"]


def test_an_open_gate_adds_no_requests(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    open_gate(kernel, broker)
    before = broker.routes()
    for code in ("1", "import asyncio; await asyncio.sleep(0)", "   ", "1/0", "get_ipython().run_cell('2')"):
        kernel.run(code)
    assert broker.routes() == before


def test_close_while_idle_shuts_the_gate_and_the_next_cell_waits(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    open_gate(kernel, broker)
    broker.stream("gate").command(GateVerb.CLOSE, 5)
    assert broker.answer_to(5) == "closed"
    request = kernel.send("x = 1")
    broker.stream("acquire", 2).granted()
    assert kernel.finish(request).status == "ok"


@pytest.mark.promise("race-gate")
@pytest.mark.parametrize(
    "code", ["print('on'); open(fifo).close()", "print('on'); await asyncio.to_thread(open, fifo)"]
)
def test_close_while_a_cell_runs_is_answered_busy(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path, code: str
) -> None:
    open_gate(kernel, broker)
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    kernel.run(f"import asyncio; fifo = {str(fifo)!r}")
    request = kernel.send(code)
    kernel.until_published(request, lambda messages: any(each["msg_type"] == "stream" for each in messages))
    broker.stream("gate").command(GateVerb.CLOSE, 5)
    assert broker.answer_to(5) == "busy"
    broker.stream("gate").command(GateVerb.SHRINK, 6)
    assert broker.answer_to(6) == "busy"
    fifo.write_text("")
    assert kernel.finish(request).status == "ok"
    broker.stream("gate").command(GateVerb.CLOSE, 7)
    assert broker.answer_to(7) == "closed"


def test_after_any_cell_the_gate_can_be_shut(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    cells = ("1/0", "def f(:", "%%nonsense\nx", "get_ipython().run_cell('')", "get_ipython().run_cell('1/0');", "  ")
    for number, code in enumerate(cells, 5):
        open_gate(kernel, broker)
        kernel.run(code)
        broker.stream("gate").command(GateVerb.CLOSE, number)
        assert broker.answer_to(number) == "closed", code


def test_nested_cells_keep_the_outer_one_running(kernel: RunningKernel, broker: ScriptedBroker, folder: Path) -> None:
    open_gate(kernel, broker)
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    kernel.run(f"fifo = {str(fifo)!r}")
    nested = (
        "ip = get_ipython(); ip.run_cell('1'); ip.run_cell(''); ip.run_cell('%gpu help'); ip.run_cell('1/0'); "
        "from IPython.display import display; display('now'); open(fifo).close()"
    )
    request = kernel.send(nested)
    kernel.until_published(
        request, lambda messages: any("now" in str(each["content"].get("data")) for each in messages)
    )
    broker.stream("gate").command(GateVerb.CLOSE, 5)
    assert broker.answer_to(5) == "busy"
    fifo.write_text("")
    assert kernel.finish(request).status == "ok"


@pytest.mark.parametrize("asks", ["input()", "import getpass; getpass.getpass()"])
def test_a_cell_that_waits_for_input_is_told_of_and_lets_the_gate_be_shut_and_waits_there_when_it_is_answered(
    kernel: RunningKernel, broker: ScriptedBroker, asks: str
) -> None:
    open_gate(kernel, broker)
    request = kernel.send(f"{asks}\nprint('on')", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=60)
    broker.wait_for(lambda: any(one["word"] == "input" and one["detail"] == request for one in broker.bodies("answer")))
    stream = broker.stream("gate")
    stream.command(GateVerb.CLOSE, 5)
    assert broker.answer_to(5) == "closed"
    stream.command(GateVerb.SHRINK, 6)
    assert broker.answer_to(6) == "done"
    kernel.client.input("typed")
    ticket = broker.stream("acquire", 2)
    ticket.waiting("lease-2 runs a cell on the only GPU.")
    kernel.until_shown(request, "lease-2 runs a cell on the only GPU.")
    ticket.granted()
    outcome = kernel.finish(request)
    assert outcome.status == "ok"
    assert outcome.printed.endswith("on\n")
    broker.wait_for(lambda: broker.bodies("answer")[-1].get("detail", "") == "")


def test_a_task_that_asks_when_its_cell_has_ended_leaves_nothing_running(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    open_gate(kernel, broker)
    task = "async def ask():\n    await go.wait()\n    input()\n    answered.set()"
    events = "import asyncio\ngo, answered = asyncio.Event(), asyncio.Event()"
    assert kernel.run(f"{events}\n{task}\ntask = asyncio.create_task(ask())").status == "ok"
    request = kernel.send("go.set(); await answered.wait()", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=PROMPT_S)
    gate = broker.stream("gate")
    gate.command(GateVerb.PREEMPT, 5)
    assert broker.answer_to(5) == "closed"
    broker.grant_at_once = True
    kernel.client.input("typed")
    assert kernel.finish(request).status == "ok"
    gate.command(GateVerb.CLOSE, 6)
    assert broker.answer_to(6) == "closed"


@pytest.mark.parametrize("code", ["x = 1", "import asyncio; await asyncio.sleep(0)"])
def test_an_interrupt_ends_the_wait_at_once(kernel: RunningKernel, broker: ScriptedBroker, code: str) -> None:
    request = kernel.send(f"{code}; print('ran')")
    broker.stream("acquire").waiting("busy")
    kernel.until_shown(request, "busy")
    start = time.monotonic()
    kernel.interrupt()
    outcome = kernel.finish(request)
    assert time.monotonic() - start < PROMPT_S
    assert outcome.error[0] == "KeyboardInterrupt"
    assert outcome.printed == ""
    broker.wait_for(lambda: "acquire" in broker.hung_up)  # the ticket is withdrawn
    broker.grant_at_once = True
    assert kernel.run("print('again')").printed == "again\n"
    handler = kernel.run("import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    assert handler.printed == "True\n", "ipykernel's own handler is back"


def test_a_refusal_fails_the_cell_and_stops_run_all(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    first, second = kernel.send("print('ran')"), kernel.send("print('ran too')")
    broker.stream("acquire").refused("Your pool has 20 GiB; this kernel asked for 40 GiB.")
    outcome = kernel.finish(first)
    assert outcome.error == (
        "InputRejected",
        "This cell did not run. Your pool has 20 GiB; this kernel asked for 40 GiB.",
    )
    (shown,) = outcome.of_type("error")
    assert shown["traceback"] == [f"{outcome.error[0]}: {outcome.error[1]}"], "one sentence, no stack of ours"
    assert kernel.finish(second).status == "aborted"
    broker.grant_at_once = True
    assert kernel.run("print('now')").printed == "now\n"


def test_a_broker_that_does_not_know_the_lease_fails_the_cell(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.leases.clear()
    assert kernel.run("1").error == ("InputRejected", "This cell did not run. there is no lease lease-1")


def test_an_hour_is_over_and_the_kernel_asks_again(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    request = kernel.send("print('ran')")
    broker.stream("acquire").refused("no GPU became free in time", reason="timeout")
    broker.stream("acquire", 2).granted()
    assert kernel.finish(request).printed == "ran\n"


def test_a_silent_cell_waits_and_shows_nothing(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    request = kernel.send("x = 41", silent=True)
    stream = broker.stream("acquire")
    stream.waiting("busy")
    stream.granted()
    outcome = kernel.finish(request)
    assert outcome.status == "ok"
    assert outcome.kinds == ["status", "status"]
    assert kernel.run("print(x + 1)").printed == "42\n"


def test_what_does_not_need_the_gpu_does_not_ask_for_it(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    for code in (
        "%gpu",
        "# note\n\n%gpu help",
        "%gpu?",
        "%%cpu\nx = 1",
        "%%cpu\nimport asyncio; await asyncio.sleep(0)",
        " \n",
        "%%cpu",
    ):
        assert kernel.run(code).status == "ok", code
        assert kernel.run(code, silent=True).status == "ok", code
        assert kernel.run(code, store_history=False).status == "ok", code
        assert "acquire" not in broker.routes(), code


def test_cells_nested_in_a_cpu_cell_do_not_ask_either(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    outcome = kernel.run("%%cpu\nget_ipython().run_cell('print(6 * 7)');\n'last'")
    assert outcome.printed == "42\n"
    assert [content["data"]["text/plain"] for content in outcome.of_type("execute_result")] == ["'last'"]
    assert "acquire" not in broker.routes()


def cpu_cell_at(kernel: RunningKernel, fifo: Path) -> str:
    os.mkfifo(fifo)
    request = kernel.send(f"%%cpu\nprint('on'); open({str(fifo)!r}).close()")
    kernel.until_published(request, lambda messages: any(each["msg_type"] == "stream" for each in messages))
    return request


def test_a_cpu_cell_needs_no_ticket_when_another_such_cell_has_ended(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path
) -> None:
    broker.stream("gate")
    subshell = kernel.create_subshell()
    request = cpu_cell_at(kernel, folder / "fifo")
    kernel.finish(kernel.send_with_header("%gpu help", subshell_id=subshell))
    broker.stream("gate").command(GateVerb.LIMIT, 5)
    assert broker.answer_to(5) == "done"  # comes after all reports of the cells
    assert set(broker.words()) == {"exempt"}
    (folder / "fifo").write_text("")
    kernel.finish(request)
    broker.wait_for(lambda: broker.words()[-1] == "done")


@pytest.mark.parametrize("verb", [GateVerb.CLOSE, GateVerb.PREEMPT])
def test_a_cpu_cell_needs_no_ticket_if_its_kernel_leaves_the_gpu(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path, verb: GateVerb
) -> None:
    open_gate(kernel, broker)
    request = cpu_cell_at(kernel, folder / "fifo")
    assert broker.words() == []
    broker.stream("gate").command(verb, 5)
    assert broker.answer_to(5) == "closed"
    broker.wait_for(lambda: broker.words() == ["exempt"])
    (folder / "fifo").write_text("")
    kernel.finish(request)
    broker.wait_for(lambda: broker.words() == ["exempt", "done"])


def test_a_cpu_cell_tells_the_next_broker_too_that_it_needs_no_ticket(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path
) -> None:
    broker.stream("gate")
    request = cpu_cell_at(kernel, folder / "fifo")
    broker.stream("gate").break_off()
    broker.stream("gate", 2).command(GateVerb.LIMIT, 5)
    broker.wait_for(lambda: broker.words() == ["exempt", "exempt"])
    (folder / "fifo").write_text("")
    kernel.finish(request)


def test_start_up_code_waits_for_no_gpu_and_the_kernel_answers(folder: Path, broker: ScriptedBroker) -> None:
    profile = folder / "ipython" / "profile_default"
    (profile / "startup").mkdir(parents=True)
    (profile / "ipython_config.py").write_text("c.InteractiveShellApp.exec_lines = ['x = 41', 'x += 1']\n")
    (profile / "startup" / "magics.ipy").write_text("y = 43\n")
    with running_kernel(kernel_environment(folder, broker.path)) as kernel:
        assert kernel.run("%%cpu\nprint(x, y)").printed == "42 43\n"
        assert "acquire" not in broker.routes()
        request = kernel.send("print('let in')")
        broker.stream("acquire").granted(CUDA_VISIBLE_DEVICES="GPU-7")
        assert kernel.finish(request).printed == "let in\n"


def test_completions_are_not_blocked_by_a_shut_gate(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    request = kernel.client.complete("%gpu s")
    reply = kernel.finish(request).reply["content"]
    assert reply["matches"] == ["status", "suspend"]
    assert "acquire" not in broker.routes()


def test_the_broker_opens_the_gate_while_a_cell_waits(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    gate = broker.stream("gate")
    request = kernel.send("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    broker.stream("acquire").waiting("busy")
    gate.command(GateVerb.OPEN, 3, CUDA_VISIBLE_DEVICES="GPU-3")
    assert broker.answer_to(3) == "open"
    assert kernel.finish(request).printed == "GPU-3\n"
    broker.wait_for(lambda: "acquire" in broker.hung_up)


@pytest.mark.promise("race-gate")
def test_close_while_a_cell_waits_is_answered_busy(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    gate = broker.stream("gate")
    request = kernel.send("1")
    acquire = broker.stream("acquire")
    gate.command(GateVerb.CLOSE, 3)
    assert broker.answer_to(3) == "busy"
    acquire.granted()
    assert kernel.finish(request).status == "ok"


def test_a_broker_that_dies_during_the_wait_is_asked_again_when_it_is_back(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    request = kernel.send("print('ran')")
    broker.stream("acquire").waiting("busy")
    kernel.until_shown(request, "busy")
    broker.stream("acquire").break_off()  # another broker already serves there when the kernel looks, so it starts none
    broker.stream("acquire", 2).granted()
    assert kernel.finish(request).printed == "ran\n"


def test_a_kernel_starts_the_broker_that_its_folder_names(folder: Path) -> None:
    started = folder / "started"
    (folder / "broker.json").write_text(
        f'{{"argv": ["/bin/sh", "-c", "echo no GPU driver is loaded >&2; touch {started}; exit 3"], "env": {{}}}}'
    )
    with running_kernel(kernel_environment(folder, str(folder / "broker.sock"))) as kernel:
        name, message = kernel.run("1").error
        assert started.exists()
        assert (name, "no GPU driver is loaded" in message) == ("InputRejected", True), message
        started.unlink()
        assert "keeps working" not in "".join(kernel.run("%gpu").shown)
        assert not started.exists(), "looking does not start a broker"


def test_the_line_is_connected_again_and_tells_the_state_of_the_gate(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    open_gate(kernel, broker)
    assert broker.stream("gate").body["open"] is False
    broker.stop()
    assert kernel.run("print('without a broker')").printed == "without a broker\n"
    broker.start()
    assert broker.stream("gate", 2).body == {**broker.stream("gate").body, "open": True, "busy": False}


@pytest.mark.parametrize("read", ["open(fifo).close()", "await asyncio.to_thread(lambda: open(fifo).close())"])
def test_a_preempted_cell_runs_on_and_the_next_one_asks(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path, read: str
) -> None:
    open_gate(kernel, broker)
    gate, fifo = broker.stream("gate"), folder / "fifo"
    os.mkfifo(fifo)
    kernel.run(f"import asyncio; fifo = {str(fifo)!r}")
    running = kernel.send(f"print('on'); {read}; print('over')")
    kernel.until_published(running, lambda messages: any(each["msg_type"] == "stream" for each in messages))
    gate.command(GateVerb.PREEMPT, 5)
    assert broker.answer_to(5) == "closed"
    assert broker.stream("acquire", 2).body["watch"], "the cell that runs takes no ticket"
    fifo.write_text("")
    assert kernel.finish(running).printed == "on\nover\n"
    following = kernel.send("print('next')")
    assert not broker.stream("acquire", 3).body["watch"]
    broker.stream("acquire", 3).granted()
    assert kernel.finish(following).printed == "next\n"


@contextmanager
def preempted_cell(kernel: RunningKernel, broker: ScriptedBroker, fifo: Path) -> Iterator[str]:
    """A cell that runs until the fifo is written to, with a line in its output that it was preempted."""
    open_gate(kernel, broker)
    os.mkfifo(fifo)
    running = kernel.send(f"print('on'); open({str(fifo)!r}).close()")
    kernel.until_published(running, lambda messages: any(each["msg_type"] == "stream" for each in messages))
    broker.stream("gate").command(GateVerb.PREEMPT, 5)
    assert broker.stream("acquire", 2).body["watch"], "it takes no ticket"
    broker.stream("acquire", 2).waiting("the neighbour runs a cell")
    kernel.until_shown(
        running, "gave the GPU to another kernel and will get it back, place 1 in the queue: the neighbour runs"
    )
    yield running


def is_blank(messages: list[dict[str, Any]]) -> bool:
    shown = [each["content"] for each in messages if each["msg_type"].endswith("display_data")]
    return (
        shown[-1]["data"] == {"text/plain": "", "text/html": ""} and len({str(one["transient"]) for one in shown}) == 1
    )


def test_below_a_preempted_cell_stands_where_the_gpu_is_until_it_is_back(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path
) -> None:
    with preempted_cell(kernel, broker, folder / "fifo") as running:
        broker.stream("acquire", 2).waiting("its memory is being brought back", position=None)
        kernel.until_shown(running, "will get it back: its memory is being brought back")
        broker.stream("gate").command(GateVerb.OPEN)
        kernel.until_published(running, is_blank)
        broker.wait_for(lambda: "acquire" in broker.hung_up)
        (folder / "fifo").write_text("")
        assert is_blank(kernel.finish(running).published)


def test_the_line_is_gone_when_the_preempted_cell_has_ended_without_the_gpu(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path
) -> None:
    with preempted_cell(kernel, broker, folder / "fifo") as running:
        (folder / "fifo").write_text("")
        assert is_blank(kernel.finish(running).published)
        broker.wait_for(lambda: "acquire" in broker.hung_up)


def test_the_line_goes_if_the_broker_says_that_the_cell_stays_after_all(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path
) -> None:
    with preempted_cell(kernel, broker, folder / "fifo") as running:
        broker.stream("acquire", 2).granted()
        kernel.until_published(running, is_blank)
        broker.stream("gate").command(GateVerb.PREEMPT, 6)
        broker.stream("acquire", 3).waiting("the neighbour runs another cell")
        kernel.until_shown(running, "the neighbour runs another cell")
        (folder / "fifo").write_text("")
        kernel.finish(running)


def test_a_gate_that_shuts_for_the_next_cell_only_takes_nothing_from_the_cell_that_runs(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path
) -> None:
    open_gate(kernel, broker)
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    running = kernel.send(f"print('on'); open({str(fifo)!r}).close()")
    kernel.until_published(running, lambda messages: any(each["msg_type"] == "stream" for each in messages))
    broker.stream("gate").command(GateVerb.PREEMPT)
    broker.stream("gate").command(GateVerb.LIMIT, 7)
    assert broker.answer_to(7) == "done"
    fifo.write_text("")
    kernel.finish(running)
    assert broker.count("acquire") == 1


@pytest.mark.parametrize(
    "cell", ["get_ipython().run_cell('print(2)')", "get_ipython().run_cell_magic('gpu', '1/4', 'print(2)')"]
)
def test_a_cell_within_a_cell_waits_without_clearing_what_the_outer_one_has_printed(
    kernel: RunningKernel, broker: ScriptedBroker, cell: str
) -> None:
    open_gate(kernel, broker)
    request = kernel.send(f"print(1); input(); {cell}", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=60)
    broker.stream("gate").command(GateVerb.PREEMPT, 5)
    assert broker.answer_to(5) == "closed"
    kernel.client.input("")
    stream = broker.stream("acquire", 2)
    stream.waiting("lease-2 runs a cell on the only GPU.")
    kernel.until_shown(request, "lease-2 runs a cell on the only GPU.")
    stream.granted()
    outcome = kernel.finish(request)
    assert (outcome.status, outcome.printed, outcome.shown[-1]) == ("ok", "1\n2\n", "")
    assert "clear_output" not in outcome.kinds


def test_a_new_limit_reaches_torch_on_the_idle_main_loop_and_raising_it_does_not_wait_for_a_cell(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    open_gate(kernel, broker)
    gate = broker.stream("gate")
    gate.command(GateVerb.LIMIT, 1, JUPYTER_GPU_MEMORY_MIB="4096")
    assert broker.answer_to(1) == "done"
    kernel.run(
        "import asyncio, sys, types\n"
        "calls, told = [], asyncio.Event()\n"
        "def limit(fraction, device): calls.append(round(fraction * 100)); told.set()\n"
        "torch = types.ModuleType('torch'); torch.cuda = types.SimpleNamespace(\n"
        "    _lazy_call=None, is_initialized=lambda: True, device_count=lambda: 1,\n"
        "    get_device_properties=lambda _: types.SimpleNamespace(total_memory=100 * 2**30),\n"
        "    set_per_process_memory_fraction=limit)\n"
        "sys.modules['torch'] = torch"
    )
    running = kernel.send("print('on'); await told.wait(); print(calls)")
    kernel.until_published(running, lambda messages: any(each["msg_type"] == "stream" for each in messages))
    gate.command(GateVerb.LIMIT, 2, JUPYTER_GPU_MEMORY_MIB=str(51712))
    assert kernel.finish(running).printed == "on\n[50]\n", "raised beneath the cell"
    lowering = "print('on'); input(); await asyncio.sleep(0); print(calls)"
    running = kernel.send(lowering, allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=60)
    gate.command(GateVerb.LIMIT, 3, JUPYTER_GPU_MEMORY_MIB=str(26112))
    assert broker.answer_to(3) == "done"
    kernel.client.input("")
    assert kernel.finish(running).printed == "on\n[50]\n", "not lowered beneath a cell"
    assert kernel.run("print(calls)").printed == "[50, 25]\n"


def test_where_the_pool_allows_it_a_cell_overlaps_with_the_resume_and_its_ticket_stays(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    gate = broker.stream("gate")
    request = kernel.send("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    stream = broker.stream("acquire")
    stream.waiting("lease-2 is being saved")
    stream.send(
        Progress(kind="waiting", reason="wait.restoring", overlap=True, environment={"CUDA_VISIBLE_DEVICES": "GPU-9"})
    )
    assert kernel.finish(request).printed == "GPU-9\n"
    following = kernel.send(
        "import asyncio, fractional_gpu_kernel\n"
        "gate, = (extension.gate for extension in fractional_gpu_kernel._loaded.values())\n"
        "print('shut' if not gate.is_open else 'open')\n"
        "while not gate.is_open: await asyncio.sleep(0.001)\n"
        "print('open')"
    )
    kernel.until_published(following, lambda messages: any(each["msg_type"] == "stream" for each in messages))
    gate.command(GateVerb.CLOSE, 1)
    assert broker.answer_to(1) == "busy"
    assert (broker.count("acquire"), broker.hung_up) == (1, []), "one ticket, which is still there"
    stream.granted()
    assert kernel.finish(following).printed == "shut\nopen\n"
    assert kernel.run("print('at once')").printed == "at once\n"
    assert broker.count("acquire") == 1


BLOCKING_TASK = """
import asyncio
async def use_the_gpu():
    open(fifo).read()
task = asyncio.create_task(use_the_gpu())
"""


@contextmanager
def blocked_main_loop(kernel: RunningKernel, broker: ScriptedBroker, fifo: Path) -> Iterator[str]:
    open_gate(kernel, broker)
    os.mkfifo(fifo)
    request = kernel.send(f"fifo = {str(fifo)!r}{BLOCKING_TASK}")
    assert kernel.finish(request).status == "ok"
    gate = broker.stream("gate")
    with fifo.open("w"):  # opens once the task reads
        gate.command(GateVerb.CLOSE, 5)
        assert broker.answer_to(5) == "closed"
        yield request


def test_a_task_that_blocks_the_main_loop_of_a_suspended_kernel_has_the_gpu_asked_for(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path
) -> None:
    gate = broker.stream("gate")
    with blocked_main_loop(kernel, broker, folder / "fifo") as started:
        request = kernel.send("print('answers')")
        for _ in range(2):
            gate.send(GateCommand(verb=""))
        acquire = broker.stream("acquire", 2)
        kernel.until_shown(started, "A task of this notebook is blocking the kernel, perhaps in a GPU call")
        broker.grant_at_once = True  # for the cell, if the task ends before this grant is read
        acquire.granted()
    assert kernel.finish(request).printed == "answers\n"
    gate.command(GateVerb.CLOSE, 6)
    assert broker.answer_to(6) == "closed"


@pytest.mark.promise("race-background")
def test_a_main_loop_that_runs_again_by_itself_asks_no_more(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path
) -> None:
    gate = broker.stream("gate")
    with blocked_main_loop(kernel, broker, folder / "fifo"):
        for _ in range(2):
            gate.send(GateCommand(verb=""))
        broker.stream("acquire", 2)
    broker.wait_for(lambda: broker.hung_up == ["acquire"])
    request = kernel.send("print('answers')")
    broker.stream("acquire", 3).granted()
    assert kernel.finish(request).printed == "answers\n"


@pytest.mark.parametrize("cell", ["pass", "%%cpu\nopen(fifo).read()", "input()"])
def test_a_main_loop_that_is_free_or_held_by_a_cell_without_the_gpu_asks_for_nothing(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path, cell: str
) -> None:
    open_gate(kernel, broker)
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    kernel.run(f"fifo = {str(fifo)!r}")
    request = kernel.send(cell, allow_stdin=True)
    if "fifo" in cell:
        writer = fifo.open("w")
    elif "input" in cell:
        kernel.client.get_stdin_msg(timeout=60)
        broker.wait_for(lambda: "input" in broker.words())
    else:
        kernel.finish(request)
    gate = broker.stream("gate")
    gate.command(GateVerb.CLOSE, 5)
    assert broker.answer_to(5) == "closed"
    for number in (6, 7, 8):
        gate.send(GateCommand(verb=""))
        gate.command(GateVerb.LIMIT, number)
        assert broker.answer_to(number) == "done"
        if cell == "pass":
            kernel.run("%gpu help")  # the loop has run on
    assert broker.count("acquire") == 1
    if "fifo" in cell:
        writer.close()
        kernel.finish(request)


def test_shrink_runs_on_the_idle_main_loop(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    open_gate(kernel, broker)
    kernel.run(
        "import sys, types, threading\n"
        "calls = []\n"
        "torch = types.ModuleType('torch'); torch.cuda = types.SimpleNamespace(\n"
        "    is_initialized=lambda: True, empty_cache=lambda: calls.append(threading.current_thread() is threading.main_thread()))\n"
        "sys.modules['torch'] = torch"
    )
    gate = broker.stream("gate")
    gate.command(GateVerb.CLOSE, 1)
    gate.command(GateVerb.SHRINK, 2)
    assert (broker.answer_to(1), broker.answer_to(2)) == ("closed", "done")
    broker.grant_at_once = True
    assert kernel.run("print(calls)").printed == "[True]\n"


def test_a_subshell_waits_without_signals_and_shares_the_ticket(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    subshell = kernel.create_subshell()
    in_subshell = kernel.send_with_header("print('subshell')", subshell_id=subshell)
    stream = broker.stream("acquire")
    stream.waiting("busy")
    kernel.until_shown(in_subshell, "busy")
    in_main = kernel.send("print('main')")
    kernel.until_shown(in_main, "busy")
    kernel.interrupt()  # ends only the main wait: the ticket stays while a cell waits
    assert kernel.finish(in_main).error[0] == "KeyboardInterrupt"
    stream.granted()
    assert kernel.finish(in_subshell).printed == "subshell\n"
    assert broker.count("acquire") == 1


def test_a_forked_child_has_an_inert_gate(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    open_gate(kernel, broker)
    broker.stream("gate").command(GateVerb.CLOSE, 1)
    assert broker.answer_to(1) == "closed"
    code = (
        "%%cpu\n"
        "import os, warnings\n"
        "warnings.simplefilter('ignore')  # Python 3.12 warns of a fork beside threads\n"
        "read, write = os.pipe()\n"
        "if (pid := os.fork()) == 0:\n"
        "    get_ipython().run_cell('x = 6 * 7', silent=True)\n"
        "    os.write(write, str(x).encode()); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(os.read(read, 10))\n"
    )
    assert kernel.run(code).printed == "b'42'\n"
    assert broker.count("acquire") == 1, "only the parent's first cell asked"
    assert broker.hung_up == []


@pytest.mark.parametrize(
    "breaks",
    [
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
        "import os; os.setuid(65534)",
    ],
    ids=["no-descriptors", "another-user"],
)
def test_a_kernel_that_cannot_call_its_broker_any_more_obeys_and_is_let_in_by_it(
    kernel: RunningKernel, broker: ScriptedBroker, breaks: str
) -> None:
    open_gate(kernel, broker)
    stream = broker.stream("gate")
    stream.command(GateVerb.CLOSE, 5)
    assert broker.answer_to(5) == "closed"
    # ipykernel's thread for output opens a separate socket with the first output, which it could not do later.
    assert kernel.run("%%cpu\nprint()").printed == "\n"
    assert kernel.run(f"%%cpu\n{breaks}").status == "ok"
    request = kernel.send("print('on')")
    kernel.until_shown(request, "This kernel cannot request the GPU")
    stream.command(GateVerb.OPEN)
    assert kernel.finish(request).printed == "on\n"
