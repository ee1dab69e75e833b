"""What `%gpu` says and does in a real kernel, notices, and a kernel without a lease."""

import threading
from pathlib import Path

import pytest

from provisioner.protocol.errors import ConflictError
from provisioner.protocol.messages import GateCommand, GateVerb
from tests.kernelext.kernels import RunningKernel, kernel_environment, running_kernel
from tests.kernelext.scripted_broker import ScriptedBroker


def test_status_shows_the_share_in_plain_words(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.extra = {
        "used_mib": 1536,
        "saved_mib": 512,
        "device_name": "NVIDIA H200",
        "position": 2,
        "state": "suspended",
        "age_ms": 65_000,
        "sentence": "Suspended because <lease-2> needed the room.",
        "suspends": 3,
        "resumes": 2,
    }
    outcome = kernel.run("%gpu")
    (text,) = outcome.shown
    assert text.splitlines() == [
        "share   1/4 GPU, 2 GiB of device memory, pool default",
        "state   saved in host memory; the next cell brings it back (for 1 min)",
        "device  NVIDIA H200 (simulated)",
        "memory  1.5 GiB of 2 GiB used",
        "saved   512 MiB held in host memory",
        "queue   place 2",
        "so far  suspended 3 times, resumed 2 times",
        "last    Suspended because <lease-2> needed the room.",
    ]
    (content,) = outcome.of_type("display_data")
    assert "&lt;lease-2&gt;" in content["data"]["text/html"]
    assert kernel.run("%gpu status").shown == [text]


def test_a_lease_that_is_over_is_said_in_one_sentence(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.leases.clear()
    assert kernel.run("%gpu").error == ("UsageError", "there is no lease lease-1")


def test_status_without_a_broker_says_what_that_means(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.stop()
    (text,) = kernel.run("%gpu").shown
    assert "no GPU broker serves at" in text
    assert "the next cell starts the broker again" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%gpu supend", "%gpu supend is not known; allowed: status, suspend, resume, help. Did you mean %gpu suspend?"),
        ("%gpu status now", "%gpu status takes no arguments; given: now"),
        ("get_ipython().run_cell_magic('cpu', 'quiet', '1')", "%%cpu takes no arguments; given: quiet"),
    ],
)
def test_a_slip_is_answered_with_what_is_allowed(
    kernel: RunningKernel, broker: ScriptedBroker, line: str, message: str
) -> None:
    broker.grant_at_once = True
    assert kernel.run(line).error == ("UsageError", message)


def test_help_lists_every_command(kernel: RunningKernel) -> None:
    printed = kernel.run("%gpu help").printed
    assert [line.split("  ")[0] for line in printed.splitlines()] == [
        "%gpu status",
        "%gpu suspend",
        "%gpu resume",
        "%gpu help",
        "%%cpu",
    ]


def test_suspend_asks_when_the_cell_is_over_and_tells_the_result_in_its_place(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    broker.held["suspend"] = threading.Event()
    request = kernel.send("%gpu suspend")
    outcome = kernel.finish(request)
    assert outcome.shown == ["[gpu] Suspends as soon as this cell is over."]
    broker.wait_for(lambda: "suspend" in broker.routes())
    broker.held["suspend"].set()
    messages = kernel.until_shown(request, "Suspended: this kernel holds no GPU memory")
    first, update = [m for m in messages if m["msg_type"].endswith("display_data")]
    assert update["msg_type"] == "update_display_data"
    assert first["content"]["transient"] == update["content"]["transient"]


def test_a_suspend_that_is_refused_says_why(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.fail["suspend"] = ConflictError("host memory is short: 2 GiB are needed, 1 GiB is left")
    request = kernel.send("%gpu suspend")
    kernel.until_shown(request, "Not suspended: host memory is short: 2 GiB are needed, 1 GiB is left")


def test_resume_waits_with_a_live_line_and_marks_no_cell_as_running(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    request = kernel.send("%gpu resume")
    stream = broker.stream("acquire")
    stream.waiting("lease-2 is being saved.")
    kernel.until_shown(request, "lease-2 is being saved.")
    stream.granted()
    outcome = kernel.finish(request)
    assert (outcome.status, outcome.shown[-1]) == ("ok", "[gpu] This kernel is on the GPU.")
    assert kernel.run("%gpu resume").shown == ["[gpu] This kernel is on the GPU."]
    broker.stream("gate").command(GateVerb.CLOSE, 1)
    assert broker.answer_to(1) == "closed"


def test_an_interrupted_resume_is_a_keyboard_interrupt(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    request = kernel.send("%gpu resume")
    broker.stream("acquire").waiting("busy")
    kernel.until_shown(request, "busy")
    kernel.interrupt()
    assert kernel.finish(request).error[0] == "KeyboardInterrupt"
    broker.wait_for(lambda: "acquire" in broker.hung_up)


def test_cpu_through_run_cell_magic_does_not_ask(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    outcome = kernel.run("%%cpu\nget_ipython().run_cell_magic('cpu', '', 'print(6 * 7)')")
    assert outcome.printed == "42\n"
    assert "acquire" not in broker.routes()


def test_a_notice_is_shown_once_above_the_next_cell(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.grant_at_once = True
    notice = GateCommand(verb=GateVerb.NOTICE, number=1, sentence="This lease is moved to another device tonight.")
    broker.stream("gate").send(notice)
    assert broker.answer_to(1) == "done"
    assert kernel.run("1", silent=True).shown == []
    assert kernel.run("1").shown[0] == "[gpu] This lease is moved to another device tonight."
    assert kernel.run("'again'").shown == []


def test_a_message_to_a_widget_waits_too(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.stream("gate")
    kernel.run(
        "%%cpu\n"
        "import comm\n"
        "def opened(comm, message): comm.on_msg(lambda _: print('callback'))\n"
        "comm.get_comm_manager().register_target('widget', opened)"
    )
    session, channel = kernel.client.session, kernel.client.shell_channel
    channel.send(session.msg("comm_open", {"comm_id": "c", "target_name": "widget", "data": {}}))
    message = session.msg("comm_msg", {"comm_id": "c", "data": {}})
    channel.send(message)
    stream = broker.stream("acquire")
    stream.granted()
    request = str(message["header"]["msg_id"])
    published = kernel.until_published(request, lambda messages: any(m["msg_type"] == "stream" for m in messages))
    assert [m["content"]["text"] for m in published if m["msg_type"] == "stream"] == ["callback\n"]


def test_a_kernel_without_a_lease_runs_and_says_why_it_has_none(folder: Path) -> None:
    environment = kernel_environment(folder, str(folder / "broker.sock"))
    del environment["JUPYTER_GPU_LEASE"]
    environment["JUPYTER_GPU_NOTICE"] = "Started without a GPU: the pool has no room after the restart."
    with running_kernel(environment) as kernel:
        outcome = kernel.run("1 + 1")
        assert outcome.shown == [f"[gpu] {environment['JUPYTER_GPU_NOTICE']}"]
        assert kernel.run("1 + 1").shown == []
        assert kernel.run("%%cpu\nprint(6 * 7)").printed == "42\n"
        assert environment["JUPYTER_GPU_NOTICE"] in kernel.run("%gpu").printed


def test_a_token_that_cannot_be_read_fails_the_cell_with_what_to_do(folder: Path) -> None:
    environment = kernel_environment(folder, str(folder / "broker.sock"))
    (folder / "token").unlink()
    with running_kernel(environment) as kernel:
        name, message = kernel.run("1").error
        assert name == "InputRejected"
        assert "cannot be read" in message
        assert "restart the kernel" in message


def test_unloading_leaves_an_ordinary_kernel(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.stream("gate")
    assert kernel.run("%%cpu\n%unload_ext kernelext").status == "ok"
    assert kernel.run("print('free')").printed == "free\n"
    assert kernel.run("%gpu").status == "error"
    assert "acquire" not in broker.routes()
    broker.wait_for(lambda: "gate" in broker.hung_up)
