"""`%%gpu`: a larger share for one cell, given back however the cell ends."""

import threading
from pathlib import Path
from typing import Any

from fractional_gpu.protocol.errors import ConflictError, NoRoomError
from fractional_gpu.protocol.messages import GateVerb
from tests.kernelext.kernels import RunningKernel, kernel_environment, running_kernel
from tests.kernelext.scripted_broker import ScriptedBroker


def sizes(broker: ScriptedBroker) -> list[int]:
    return [body["fraction_milli"] for body in broker.bodies("resize")]


def granted(kernel: RunningKernel, broker: ScriptedBroker, code: str) -> Any:  # noqa: ANN401 - see `kernels`
    broker.grant_at_once = True
    return kernel.run(code)


def test_a_burst_has_its_share_before_it_runs_and_gives_it_back(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    outcome = granted(kernel, broker, "%%gpu 1 --memory 8GiB\nprint('ran')\n6 * 7")
    assert (outcome.status, outcome.printed) == ("ok", "ran\n")
    assert outcome.kinds == ["status", "execute_input", "stream", "execute_result", "status"], (
        "nothing of ours is shown"
    )
    assert [(body["fraction_milli"], body["memory_mib"]) for body in broker.bodies("resize")] == [
        (1000, 8192),
        (250, 2048),
    ]
    assert [body["burst"] for body in broker.bodies("resize")] == [True, False]
    routes = [route for route in broker.routes() if route in {"resize", "acquire"}]
    assert routes == ["resize", "acquire", "resize"], "the share first, then the GPU"


def test_a_cell_that_fails_is_cancelled_or_is_nested_gives_back_too(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    assert granted(kernel, broker, "%%gpu 1/2\n1/0").error[0] == "ZeroDivisionError"
    assert sizes(broker) == [500, 250]
    assert kernel.run("%%gpu 1/2\nimport asyncio\nawait asyncio.sleep(0)\nprint('awaited')").printed == "awaited\n"
    assert sizes(broker) == [500, 250] * 2
    running = kernel.send("%%gpu 1/2\nprint('on')\nwhile True: await asyncio.sleep(0.01)")
    kernel.until_published(running, lambda messages: any(each["msg_type"] == "stream" for each in messages))
    kernel.interrupt()
    assert kernel.finish(running).status == "error"
    assert sizes(broker) == [500, 250] * 3
    nested = "%%gpu 1/2\nget_ipython().run_cell('%%gpu 1\\nprint(1)'); print(2)"
    assert kernel.run(nested).printed == "1\n2\n"
    assert sizes(broker)[6:] == [500, 1000, 500, 250]
    assert [body["burst"] for body in broker.bodies("resize")][6:] == [True, True, True, False]
    assert kernel.run("%%gpu 1/2\n%%capture out\nprint('x')").status == "ok"
    assert kernel.run("print(out.stdout)").printed == "x\n\n"
    assert sizes(broker)[10:] == [500, 250]
    assert kernel.run("get_ipython().run_cell_magic('gpu', '1/2', 'print(3)')").printed == "3\n"
    assert sizes(broker)[12:] == [500, 250]


def test_a_share_that_is_not_larger_changes_nothing(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    assert granted(kernel, broker, "%%gpu 1/8\nprint('ran')").printed == "ran\n"
    assert granted(kernel, broker, "%%gpu 1/4 --memory 2GiB\nprint('ran')").printed == "ran\n"
    assert sizes(broker) == []


def test_what_cannot_be_had_fails_the_cell_before_it_runs(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.grant_at_once = True
    slips = {
        "": "%%gpu: the following arguments are required: FRACTION; usage: %%gpu [-h] [--memory SIZE] FRACTION",
        "7": '%%gpu: fraction \'7\' is out of range; expected more than 0 and at most 1, such as 0.25, "1/4" or "250m"',
        "status": "%%gpu takes a share for one cell, such as %%gpu 1; for the command, write %gpu status",
    }
    for text, sentence in slips.items():
        error = kernel.run(f"%%gpu {text}\nprint('ran')").error
        assert error == ("InputRejected", f"This cell did not run. {sentence}"), text
    broker.fail["resize"] = NoRoomError("1 GPU is more than your limit of 1/2 in pool default")
    refused = kernel.run("%%gpu 1\nprint('ran')")
    assert refused.error[1] == "This cell did not run. 1 GPU is more than your limit of 1/2 in pool default"
    assert (refused.printed, sizes(broker)) == ("", [1000]), "what was refused is not given back"
    assert "acquire" not in broker.routes()


def test_an_interrupt_while_it_waits_for_its_share_gives_up(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.grant_at_once = True
    broker.held["resize"] = threading.Event()
    request = kernel.send("%%gpu 1\nprint('ran')")
    broker.stream("events").send(broker.host_status(position=1, sentence="lease-2 runs a cell"))
    kernel.until_shown(request, "This kernel is waiting for its new share, place 1 in the queue: lease-2 runs a cell.")
    kernel.interrupt()
    broker.wait_for(lambda: len(sizes(broker)) == 2)
    broker.held["resize"].set()
    outcome = kernel.finish(request)
    assert outcome.error == ("KeyboardInterrupt", "interrupted while waiting for the GPU; this cell did not run")
    assert (outcome.printed, sizes(broker)) == ("", [1000, 250]), "in case it was granted at that very moment"
    assert "clear_output" in outcome.kinds, "the line is gone"


def test_what_cannot_be_given_back_is_said_and_tried_again_after_the_next_cell(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    broker.grant_at_once = True
    request = kernel.send("%%gpu 1/2\ninput()", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=60)
    broker.fail["resize"] = ConflictError("the lease uses 3 GiB, more than 2 GiB")
    kernel.client.input("")
    outcome = kernel.finish(request)
    assert outcome.status == "ok", "the cell's own result stands"
    (shown,) = outcome.shown
    assert shown == (
        "[gpu] This cell's larger share could not be given back yet: the lease uses 3 GiB, more than 2 GiB. "
        "The kernel tries again after each cell; this kernel's own share is 1/4 GPU, 2 GiB."
    )
    assert kernel.run("1").shown == [], "said once"
    assert sizes(broker) == [500, 250, 250]
    broker.fail.clear()
    kernel.run("2")
    kernel.run("3")
    assert sizes(broker) == [500, 250, 250, 250]


def test_the_limit_is_raised_after_the_broker_agreed_and_lowered_before_it_is_told(
    folder: Path, broker: ScriptedBroker
) -> None:
    """At no moment may a framework use more than is reserved."""
    broker.grant_at_once = True
    (folder / "torch.py").write_text(
        "import types\n"
        "class cuda:\n"
        "    log = []\n"
        "    _lazy_call = staticmethod(lambda call: None)\n"
        "    is_initialized = staticmethod(lambda: True)\n"
        "    device_count = staticmethod(lambda: 1)\n"
        "    get_device_properties = staticmethod(lambda index: types.SimpleNamespace(total_memory=100 * 2**30))\n"
        "    empty_cache = staticmethod(lambda: cuda.log.append('caches freed'))\n"
        "    set_per_process_memory_fraction = staticmethod(lambda fraction, index: cuda.log.append(round(fraction * 100)))\n"
    )
    environment = kernel_environment(folder, broker.path)
    environment["PYTHONPATH"] += f":{folder}"
    environment["JUPYTER_GPU_MEMORY_MIB"] = "2048"
    with running_kernel(environment) as kernel:
        kernel.run("import torch")
        broker.held["resize"] = raising = threading.Event()
        request = kernel.send("%%gpu 1/2\nprint(torch.cuda.log); input()", allow_stdin=True)
        broker.wait_for(lambda: len(sizes(broker)) == 1)
        broker.lease_fields = {"reserve_mib": 51712}
        raising.set()
        kernel.client.get_stdin_msg(timeout=60)
        broker.lease_fields = {}
        broker.held["resize"] = lowering = threading.Event()
        kernel.client.input("")
        broker.wait_for(lambda: len(sizes(broker)) == 2)
        lowering.set()
        assert kernel.finish(request).printed == "[50]\n"
        assert kernel.run("print(torch.cuda.log)").printed == "[50, 2, 'caches freed']\n"


def test_a_burst_on_a_suspended_kernel_grows_first_and_then_waits_for_the_gpu(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    granted(kernel, broker, "pass")
    broker.grant_at_once = False
    broker.stream("gate").command(GateVerb.CLOSE, 1)
    assert broker.answer_to(1) == "closed"
    request = kernel.send("%%gpu 1\nprint('ran')")
    stream = broker.stream("acquire", 2)
    assert sizes(broker) == [1000]
    stream.granted()
    assert kernel.finish(request).printed == "ran\n"
    assert sizes(broker) == [1000, 250]
