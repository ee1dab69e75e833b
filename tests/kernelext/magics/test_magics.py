"""What `%gpu` prints and does in a real kernel, notices, and a kernel without a lease."""

import threading
from pathlib import Path

import pytest

from fractional_gpu.protocol.errors import (
    ConflictError,
    ForbiddenError,
    InternalBrokerError,
    NoRoomError,
    NotFoundError,
)
from fractional_gpu.protocol.messages import GateCommand, GateVerb
from fractional_gpu_kernel.display.cost import CostView
from fractional_gpu_kernel.magics.arguments import COMMANDS
from tests.kernelext.kernels import RunningKernel, forked_kernel, kernel_environment
from tests.kernelext.scripted_broker import LEASE, ScriptedBroker
from tests.kernelext.statuses import COST
from tests.support.fake_broker import DEADLINE_S


def test_status_shows_the_share_in_plain_words(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.lease_fields = {
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
    assert {line.split()[0] for line in text.splitlines()} >= {"share", "state", "device", "saved", "queue", "last"}
    (content,) = outcome.of_type("display_data")
    assert "&lt;lease-2&gt;" in content["data"]["text/html"]
    assert kernel.run("%gpu status").shown == [text]


def test_a_lease_that_is_over_is_said_in_one_sentence(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.leases.clear()
    assert kernel.run("%gpu").error == ("GPURequestError", "there is no lease lease-1")


def test_status_without_a_broker_says_what_that_means(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.stop()
    (text,) = kernel.run("%gpu").shown
    assert broker.path in text
    assert "the next cell" in text


def test_cost_is_shown_without_the_gpu_and_loads_its_words_only_then(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    broker.cost = COST
    loaded = (
        "%%cpu\nimport sys\nprint([one for one in sys.modules if 'metering' in one or one.endswith('display.cost')])"
    )
    kernel.run("%gpu status")
    assert kernel.run(loaded).printed.strip() == "[]"
    outcome = kernel.run("%gpu cost")
    assert outcome.shown == [repr(CostView(COST))]
    (content,) = outcome.of_type("display_data")
    assert "1,234.550 EUR + 0.200 USD" in content["data"]["text/html"]
    assert "fractional_gpu_kernel.display.cost" in kernel.run(loaded).printed
    assert "acquire" not in broker.routes(), "the kernel is on no GPU, and has not asked for one"


REFUSALS = {
    "%gpu pin 5h": ("pin", ConflictError("a pin lasts 4 h at most here; given: 5 h", reason="pin-too-long")),
    "%gpu unpin": ("unpin", ConflictError("the kernel has ended")),
    "%gpu resize 1": ("resize", NoRoomError("1 GPU is 80 GiB; pool default allows 1/2 at most")),
    "%gpu request 1": ("resize", ConflictError("the lease uses 30 GiB")),
    "%gpu history": ("history", NotFoundError("there is no lease lease-1 of yours")),
    "%gpu explain": ("story", InternalBrokerError("the broker failed; its log says why")),
    "%gpu top": ("status", ForbiddenError("not yours")),
}


def test_a_refusal_of_the_broker_is_shown_in_its_words(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    for line, (route, error) in REFUSALS.items():
        broker.fail = {route: error}
        assert kernel.run(line).error == ("GPURequestError", str(error)), line


def test_help_lists_every_command_and_tells_more_about_one(kernel: RunningKernel) -> None:
    printed = kernel.run("%gpu help").printed
    listed = [line.split()[1] for line in printed.splitlines() if line.startswith("%gpu ")]
    assert listed == [*COMMANDS, "COMMAND"]
    assert "%%gpu FRACTION" in printed
    assert kernel.run("%gpu -h").printed == printed
    more = kernel.run("%gpu pin --help").printed
    assert "[DURATION]" in more
    assert kernel.run("%gpu help pin").printed == more
    shown = kernel.run("%gpu?").reply["content"]["payload"][0]["data"]["text/plain"]
    assert "%gpu resize 1/2" in shown
    assert "at the cell's end" in kernel.run("%%gpu?").reply["content"]["payload"][0]["data"]["text/plain"]


def test_suspend_asks_when_the_cell_is_over_and_tells_the_result_in_its_place(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    broker.held["suspend"] = threading.Event()
    request = kernel.send("%gpu suspend")
    outcome = kernel.finish(request)
    assert len(outcome.shown) == 1
    broker.wait_for(lambda: "suspend" in broker.routes())
    broker.held["suspend"].set()
    messages = kernel.until_shown(request, "Suspended: this kernel's GPU memory is saved")
    first, update = [m for m in messages if m["msg_type"].endswith("display_data")]
    assert update["msg_type"] == "update_display_data"
    assert first["content"]["transient"] == update["content"]["transient"]


def test_a_suspend_that_is_refused_says_why(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.fail["suspend"] = ConflictError("host memory is short: 2 GiB is needed, 1 GiB is left")
    request = kernel.send("%gpu suspend")
    kernel.until_shown(request, "Not suspended: host memory is short: 2 GiB is needed, 1 GiB is left")


def test_suspend_in_a_subshell_does_not_wait_for_a_main_shell_that_stands_still(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    kernel.client.control_channel.send(kernel.client.session.msg("create_subshell_request"))
    subshell = kernel.client.get_control_msg(timeout=DEADLINE_S)["content"]["subshell_id"]
    in_main = kernel.send("%%cpu\nimport threading\ngo_on = threading.Event()\nprint('stands')\ngo_on.wait()")
    kernel.until_published(in_main, lambda messages: any(one["msg_type"] == "stream" for one in messages))
    request = kernel.send_with_header("%gpu suspend", subshell_id=subshell)
    kernel.until_shown(request, "Suspended: this kernel's GPU memory is saved")
    assert broker.routes().count("suspend") == 1
    kernel.send_with_header("%%cpu\ngo_on.set()", subshell_id=subshell)
    assert kernel.finish(in_main).status == "ok"


def test_a_suspend_waits_for_its_own_shells_cell(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    kernel.client.control_channel.send(kernel.client.session.msg("create_subshell_request"))
    subshell = kernel.client.get_control_msg(timeout=DEADLINE_S)["content"]["subshell_id"]
    code = "import threading\ngo_on = threading.Event()\nget_ipython().run_line_magic('gpu', 'suspend')\ngo_on.wait()"
    in_main = kernel.send(f"%%cpu\n{code}")
    kernel.until_shown(in_main, "This kernel will be suspended when this cell ends.")
    kernel.finish(kernel.send_with_header("%%cpu\npass", subshell_id=subshell))  # another shell's cell has ended
    asked = "[one.join() for one in threading.enumerate() if one.name == 'gpu-after-cell']"
    asked = f"%%cpu\nimport asyncio\nawait asyncio.sleep(0)\n{asked}"  # the loop has made its pending calls
    assert kernel.finish(kernel.send_with_header(asked, subshell_id=subshell)).status == "ok"
    assert "suspend" not in broker.routes()
    kernel.send_with_header("%%cpu\ngo_on.set()", subshell_id=subshell)
    kernel.finish(in_main)
    kernel.until_shown(in_main, "Suspended: this kernel's GPU memory is saved")
    assert broker.routes().count("suspend") == 1


def test_resume_waits_with_a_live_line_and_marks_no_cell_as_running(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    request = kernel.send("%gpu resume")
    stream = broker.stream("acquire")
    stream.waiting("lease-2 is being saved.")
    kernel.until_shown(request, "lease-2 is being saved.")
    stream.granted()
    outcome = kernel.finish(request)
    assert outcome.status == "ok"
    assert kernel.run("%gpu resume").shown == [outcome.shown[-1]]
    broker.stream("gate").command(GateVerb.CLOSE, 1)
    assert broker.answer_to(1) == "closed"


def test_release_ends_the_pin_and_gives_the_reservation_back(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    request = kernel.send("%gpu release")
    kernel.until_shown(request, "Released: no GPU memory is reserved for this kernel.")
    assert [route for route in broker.routes() if route in {"unpin", "suspend"}] == ["unpin", "suspend"]


@pytest.mark.parametrize("earlier", ["suspend", "release"])
@pytest.mark.parametrize("later", ["pin 30m", "resume", "request 1/4"])
def test_of_commands_that_contradict_each_other_the_later_one_wins(
    kernel: RunningKernel, broker: ScriptedBroker, earlier: str, later: str
) -> None:
    broker.grant_at_once = True
    broker.lease_fields = {"pinned_ms": 1_800_000, "state": "resident"}
    request = kernel.send(f"%gpu {earlier}\n%gpu {later}")
    kernel.until_shown(request, f"%gpu {later.split(maxsplit=1)[0]} came later and replaces this command.")
    kernel.finish(request)
    kernel.run("%gpu")  # a message at the first cell's end would have arrived by now
    assert not {"suspend", "unpin"} & set(broker.routes())
    request = kernel.send(f"%gpu pin\n%gpu {earlier}")
    kernel.until_shown(request, "this kernel's GPU memory is saved" if earlier == "suspend" else "Released:")


def test_a_later_cell_withdraws_what_the_broker_has_not_begun(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.held["suspend"] = threading.Event()
    request = kernel.send("%gpu release")
    kernel.finish(request)
    broker.wait_for(lambda: "suspend" in broker.routes())
    assert kernel.run("%gpu pin").status == "ok"
    kernel.until_shown(request, "Not released: %gpu pin came later and replaces this command.")
    broker.held["suspend"].set()


def test_a_pin_says_how_long_and_what_it_does(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.lease_fields = {"pinned_ms": 1_800_000, "state": "resident"}
    (text,) = kernel.run("%gpu pin").shown
    assert "30 min" in text
    broker.lease_fields = {"pinned_ms": 7_200_000, "state": "suspended"}
    assert "%gpu resume" in kernel.run("%gpu pin 2h").shown[0], "it counts when the kernel is on the GPU"
    assert [body["duration_ms"] for body in broker.bodies("pin")] == [1_800_000, 7_200_000]
    assert kernel.run("%gpu unpin").status == "ok"
    assert broker.routes().count("unpin") == 1


def test_a_note_is_written_shown_and_removed(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    assert "no note" in kernel.run("%gpu note").shown[0]
    broker.lease_fields = {"note": "waits for -> the big run"}
    for line in ("%gpu note waits for -> the big run", '%gpu note "waits for -> the big run"', "%gpu note"):
        assert kernel.run(line).shown[0].endswith("waits for -> the big run")
    assert "waits for -> the big run" in kernel.run("%gpu").shown[0]
    broker.lease_fields = {}
    for line in ("%gpu note --clear", '%gpu note ""'):
        assert "no note" in kernel.run(line).shown[0]
    assert [body["note"] for body in broker.bodies("note")] == ["waits for -> the big run"] * 2 + [""] * 2


def test_a_resize_binds_the_new_limit_and_says_it(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.grant_at_once = True
    kernel.run("import os, sys, types; sys.modules['jax'] = types.ModuleType('jax')")
    broker.lease_fields = {"reserve_mib": 4096}
    (text,) = kernel.run("%gpu resize 1/2 --memory 4GiB").shown
    assert "1/2 GPU, 4 GiB" in text
    assert "JAX" in text
    assert kernel.run("print(os.environ['JUPYTER_GPU_MEMORY_MIB'])").printed == "4096\n"
    assert broker.bodies("resize") == [
        {"fraction_milli": 500, "memory_mib": 4096, "wait_ms": 3_600_000, "burst": False}
    ]


def test_a_resize_that_waits_can_be_interrupted_and_hangs_up(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.held["resize"] = threading.Event()
    request = kernel.send("import asyncio\nget_ipython().run_line_magic('gpu', 'resize 1/2')\nawait asyncio.sleep(0)")
    broker.stream("acquire").granted()
    follower = broker.stream("events")
    waits = broker.host_status(
        position=2, sentence="10 GiB is needed", expected_ms=30_000, expected_bounds_ms=(20_000, 90_000)
    )
    follower.send(waits)
    kernel.until_shown(
        request,
        "is waiting for its new share, place 2 in the queue, about 30 s more (20 s to 2 min): 10 GiB is needed.",
    )
    kernel.interrupt()
    assert kernel.finish(request).error[0] == "KeyboardInterrupt"
    broker.wait_for(lambda: "events" in broker.hung_up)
    broker.held["resize"].set()


def test_a_later_resize_asks_when_the_cell_is_over(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    request = kernel.send("%gpu resize 1/2 --later")
    messages = kernel.until_shown(request, "Its share is now 1/2 GPU")
    assert broker.bodies("resize")[0]["fraction_milli"] == 500
    assert any("when this cell ends" in str(message["content"]) for message in messages)


def test_request_resizes_and_waits_for_the_gpu(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    request = kernel.send("%gpu request 1/2 --pool default")
    broker.stream("acquire").granted()
    assert "1/2 GPU, 2 GiB" in kernel.finish(request).shown[-1]


def test_a_warning_while_the_kernel_idles_is_shown_at_once_without_making_it_busy(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    broker.grant_at_once = True
    gate = broker.stream("gate")
    request = kernel.send("1")
    kernel.finish(request)
    gate.send(
        GateCommand(verb=GateVerb.NOTICE, number=1, sentence="Suspended in 1 min for being idle; %gpu pin keeps it.")
    )
    published = kernel.until_shown(request, "Suspended in 1 min")
    after = published[[message["msg_type"] for message in published].index("execute_result") + 2 :]
    assert [message["msg_type"] for message in after] == ["display_data"], "output only, no busy status"
    following = kernel.run("2")
    (blank,) = [
        each["content"]
        for each in kernel.until_published(request, lambda m: len(m) > len(published) - 1)
        if each["msg_type"] == "update_display_data"
    ]
    assert blank["data"]["text/plain"] == ""
    assert following.shown == []


def test_a_notice_is_shown_once_above_the_next_cell(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.grant_at_once = True
    notice = GateCommand(verb=GateVerb.NOTICE, number=1, sentence="This lease is moved to another device tonight.")
    broker.stream("gate").send(notice)
    assert broker.answer_to(1) == "done"
    assert kernel.run("1", silent=True).shown == []
    assert kernel.run("1").shown[0] == "[gpu] This lease is moved to another device tonight."
    assert kernel.run("'again'").shown == []


def test_a_notice_that_comes_while_a_cell_runs_is_shown_beneath_it_and_stays(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    broker.grant_at_once = True
    gate = broker.stream("gate")
    request = kernel.send("print(input())", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=DEADLINE_S)
    gate.send(GateCommand(verb=GateVerb.NOTICE, number=1, sentence="This kernel uses more than its cap."))
    assert broker.answer_to(1) == "done"
    kernel.client.input("typed")
    outcome = kernel.finish(request)
    assert (outcome.printed, outcome.shown) == ("typed\n", ["[gpu] This kernel uses more than its cap."])
    assert kernel.run("2").shown == []


def test_an_urgent_notice_is_shown_while_the_cell_runs_and_stays(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.grant_at_once = True
    gate = broker.stream("gate")
    request = kernel.send("print(input())", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=DEADLINE_S)
    sentence = "This kernel's GPU goes away in 2 min."
    gate.send(GateCommand(verb=GateVerb.NOTICE, number=1, sentence=sentence, urgent=True))
    kernel.until_shown(request, sentence)
    kernel.client.input("typed")
    outcome = kernel.finish(request)
    assert outcome.printed == "typed\n", "the cell ran on"
    kinds = [message["msg_type"] for message in kernel.until_published(request, lambda _: True)]
    assert "update_display_data" not in kinds, "it stays"
    assert kernel.run("2").shown == []


def test_an_urgent_notice_does_not_go_beneath_a_subshells_cell_that_has_ended(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    broker.grant_at_once = True
    kernel.client.control_channel.send(kernel.client.session.msg("create_subshell_request"))
    subshell = kernel.client.get_control_msg(timeout=DEADLINE_S)["content"]["subshell_id"]
    in_main = kernel.send("import threading\ngo_on = threading.Event()\nprint('trains')\ngo_on.wait()")
    kernel.until_published(in_main, lambda messages: any(one["msg_type"] == "stream" for one in messages))
    kernel.finish(kernel.send_with_header("pass", subshell_id=subshell))
    gate = broker.stream("gate")
    gate.send(GateCommand(verb=GateVerb.NOTICE, number=1, sentence="The GPU goes away in 2 min.", urgent=True))
    gate.send(GateCommand(verb=GateVerb.NOTICE, number=2, sentence="This kernel uses more than its cap."))
    assert (broker.answer_to(1), broker.answer_to(2)) == ("done", "done")
    kernel.send_with_header("go_on.set()", subshell_id=subshell)  # its reply may come after the other cell's
    assert "[gpu] The GPU goes away in 2 min." in kernel.finish(in_main).shown


def test_a_notice_takes_the_place_of_an_earlier_one_about_the_same(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    """The earlier one was kept before the first cell; the new one is shown below the last."""
    broker.grant_at_once = True
    gate = broker.stream("gate")

    def told(number: int, sentence: str) -> None:
        notice = GateCommand(verb=GateVerb.NOTICE, number=number, sentence=sentence, urgent=True, topic="deadline")
        gate.send(notice)
        assert broker.answer_to(number) == "done"

    told(1, "This kernel's GPU goes away in 2 min.")
    told(2, "This kernel's GPU will not go away after all.")
    request = kernel.send("1")
    assert kernel.finish(request).shown == ["[gpu] This kernel's GPU will not go away after all."]
    told(3, "This kernel's GPU goes away in 3 min.")
    told(4, "Now it stays.")
    messages = kernel.until_published(
        request, lambda published: any("Now it stays." in str(one["content"]) for one in published)
    )
    first, second = [one for one in messages if "in 3 min" in str(one["content"]) or "stays." in str(one["content"])]
    assert (first["msg_type"], second["msg_type"]) == ("display_data", "update_display_data")
    assert first["content"]["transient"] == second["content"]["transient"], "in the same line"


@pytest.mark.parametrize(
    "cell", ["%%capture\nprint(input())", "get_ipython().run_cell('1')\nprint(input())"], ids=["captured", "nested"]
)
def test_a_notice_is_not_lost_to_a_cell_within_the_cell(
    kernel: RunningKernel, broker: ScriptedBroker, cell: str
) -> None:
    broker.grant_at_once = True
    gate = broker.stream("gate")
    request = kernel.send(cell, allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=DEADLINE_S)
    gate.send(GateCommand(verb=GateVerb.NOTICE, number=1, sentence="This kernel uses more than its cap."))
    assert broker.answer_to(1) == "done"
    kernel.client.input("typed")
    assert kernel.finish(request).shown == ["[gpu] This kernel uses more than its cap."]
    assert kernel.run("2").shown == []
    kinds = [message["msg_type"] for message in kernel.until_published(request, lambda _: True)]
    assert "update_display_data" not in kinds, "it stays"


def test_what_a_client_runs_for_itself_takes_no_notice_from_the_next_cell(
    kernel: RunningKernel, broker: ScriptedBroker
) -> None:
    broker.grant_at_once = True
    notice = GateCommand(verb=GateVerb.NOTICE, number=1, sentence="This lease is moved to another device tonight.")
    broker.stream("gate").send(notice)
    assert broker.answer_to(1) == "done"
    assert kernel.run("1", store_history=False).shown == []
    assert kernel.run("1").shown == ["[gpu] This lease is moved to another device tonight."]


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
    with forked_kernel(environment) as kernel:
        outcome = kernel.run("1 + 1")
        assert outcome.shown == [f"[gpu] {environment['JUPYTER_GPU_NOTICE']}"]
        assert kernel.run("1 + 1").shown == []
        assert kernel.run("%%cpu\nprint(6 * 7)").printed == "42\n"
        assert environment["JUPYTER_GPU_NOTICE"] in kernel.run("%gpu").printed


def test_a_notebook_for_a_share_runs_to_its_end_on_a_kernel_without_one(folder: Path) -> None:
    environment = kernel_environment(folder, str(folder / "broker.sock"))
    del environment["JUPYTER_GPU_LEASE"]
    with forked_kernel(environment) as kernel:
        for line in ("%gpu", "%gpu resize 1/2", "%gpu pin always", "%gpu suspend"):
            outcome = kernel.run(line)
            assert outcome.status == "ok", line
            assert "This kernel has no share of a GPU" in outcome.printed, line
        cell = "from __future__ import annotations\nimport asyncio\nprint(await asyncio.sleep(0, 42))"
        outcome = kernel.run(f"\n%%gpu 1/2 --memory 4GiB\n{cell}")
        assert (outcome.status, outcome.printed) == ("ok", "42\n")
        (note,) = outcome.shown
        assert note.startswith(
            "[gpu] This cell runs without the larger share that %%gpu requests. This kernel has no share"
        )
        outcome = kernel.run(f"%%gpu measure --setup 1-3\n{cell}")
        assert (outcome.status, outcome.printed) == ("ok", "42\n")
        assert outcome.shown[0].startswith("[gpu] This cell runs once and is not measured. This kernel has no share")
        assert "44" in kernel.run("%%gpu 1\n%%time\nprint(44)").printed
        assert kernel.run("get_ipython().run_cell_magic('gpu', '1', 'print(45)')").printed == "45\n"
        assert kernel.run(f"%%cpu\n{cell}").printed == "42\n"
        assert kernel.run("%load_ext fractional_gpu_kernel\n%gpu").status == "ok", (
            "what the documents tell to put above"
        )
        assert kernel.run("%unload_ext fractional_gpu_kernel").status == "ok"
        assert kernel.run("%%gpu 1\nprint(47)").printed != "47\n"


@pytest.mark.parametrize("content", [None, b"", b"to\xffken", b"two\nlines"])
def test_a_kernel_whose_token_is_gone_or_damaged_asks_without_one(
    folder: Path, broker: ScriptedBroker, content: bytes | None
) -> None:
    """The broker identifies its process, so a kernel without the file needs no restart."""
    environment = kernel_environment(folder, broker.path)
    if content is None:
        (folder / "token").unlink()
    else:
        (folder / "token").write_bytes(content)
    broker.leases[LEASE].token = ""  # only a request without a token is answered
    broker.grant_at_once = True
    with forked_kernel(environment) as kernel:
        assert kernel.run("print(6 * 7)").printed == "42\n"


def test_unloading_leaves_an_ordinary_kernel(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.stream("gate")
    assert kernel.run("%%cpu\n%unload_ext fractional_gpu_kernel").status == "ok"
    assert kernel.run("print('free')").printed == "free\n"
    assert kernel.run("%gpu").status == "error"
    assert "acquire" not in broker.routes()
    broker.wait_for(lambda: "gate" in broker.hung_up)


_OTHERS = """%%cpu
shell, cells = get_ipython(), []
ours = shell.run_cell_async

def counted(raw_cell, *args, **kwargs):
    cells.append(raw_cell)
    return ours(raw_cell, *args, **kwargs)

shell.run_cell_async = counted
shell.register_magic_function(lambda line: print("theirs"), "line", "gpu")
shell.input_transformers_cleanup.clear()
shell.Completer.custom_matchers.clear()
shell.events.callbacks["pre_run_cell"].clear()
shell.extension_manager.unload_extension("fractional_gpu_kernel")
"""


def test_unloading_takes_out_only_what_is_ours(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.stream("gate")
    assert kernel.run(_OTHERS).status == "ok"
    assert kernel.run("print('free')").printed == "free\n"
    assert kernel.run("%gpu").printed == "theirs\n"
    assert kernel.run("print(len(cells))").printed == "3\n"
    broker.wait_for(lambda: "gate" in broker.hung_up)
