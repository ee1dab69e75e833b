"""The kernel extension's texts, as users read them: golden/views.txt and golden/magics.txt."""

import re
from pathlib import Path

from msgspec.structs import replace

from fractional_gpu.core.model import Slowdown
from fractional_gpu.protocol.errors import ConflictError, ForbiddenError, NoRoomError
from fractional_gpu.protocol.messages import Progress
from fractional_gpu.protocol.status import History, LeaseStatus, Story, StoryLine
from fractional_gpu_kernel.display.chart import HistoryView
from fractional_gpu_kernel.display.cost import CostView
from fractional_gpu_kernel.display.lines import resizing, wait_text
from fractional_gpu_kernel.display.views import StatusView, StoryView, TopView
from fractional_gpu_kernel.magics.arguments import BURST, COMMANDS, MEASURE
from tests.kernelext.kernels import RunningKernel
from tests.kernelext.scripted_broker import ScriptedBroker
from tests.kernelext.statuses import ADVICE, COST, DEVICE, LEASE, NOW_MS, UNPRICED, host, points
from tests.support.golden import check_wording
from tests.support.statuses import changed

GOLDEN = Path(__file__).with_name("golden")
SUSPENDED = changed(
    LEASE,
    state="suspended",
    used_mib=0,
    saved_mib=512,
    resume_ms=2100,
    resume_bounds_ms=(1800, 4200),
    position=2,
    expected_ms=40_000,
    pinned_ms=0,
)
STATUSES: dict[str, LeaseStatus] = {
    "on the GPU, pinned, with neighbours": LEASE,
    "suspended": SUSPENDED,
    "suspended, back soon, a forecast with its span": changed(
        SUSPENDED, resume_ms=300, resume_bounds_ms=(200, 2000), expected_bounds_ms=(10_000, 120_000)
    ),
    "simulated, suspended twice": changed(SUSPENDED, simulated=True, suspends=3, resumes=2, neighbours=[]),
    "it cannot be suspended": changed(LEASE, unsuspendable_reason="its memory is managed (RMM)", neighbours=[]),
    "slowed down": changed(
        LEASE,
        slowdown=Slowdown(milli=1340, brief="runs next to eval.ipynb, about 1.3 times as long as alone (1.1 to 1.7)"),
    ),
    "a smaller share is suggested": changed(LEASE, advice=ADVICE, neighbours=[]),
    "its GPU goes away, and it is saved": changed(LEASE, goes_away_in_ms=61_000, neighbours=[]),
    "its GPU goes away, and it cannot be saved": changed(
        LEASE,
        goes_away_in_ms=29_500,
        lost_because="saving 512 MiB is expected to take 40 s, and there is too little time, or more valuable kernels need it",
        neighbours=[],
    ),
    "its host goes away": changed(LEASE, host_goes_away_in_ms=30_000, neighbours=[]),
    "on two devices": changed(LEASE, device_ids=["GPU-0", "GPU-1"], neighbours=[]),
}
FORECAST = {"expected_ms": 40_000, "low_ms": 10_000, "high_ms": 60_000}
ROOM = {"reason": "wait.busy-neighbour", "sentence": "20 GiB is needed, 4 GiB is free; 1 kernel is running a cell"}
WAITS: dict[str, tuple[float, dict[str, object]]] = {
    "with a place, a forecast and a reason": (0, {**FORECAST, **ROOM, "position": 2}),
    "a turn ends": (3, {**FORECAST, **ROOM, "position": 1, "turn_ms": 28_000}),
    "a turn ends, and another kernel is before it": (0, {**FORECAST, **ROOM, "position": 2, "turn_ms": 28_000}),
    "a turn has ended": (28, {**FORECAST, **ROOM, "position": 1, "turn_ms": 28_000}),
    "the forecast counts down": (20, {**FORECAST, **ROOM}),
    "the forecast was wrong": (50, {**FORECAST, **ROOM}),
    "the forecast was very wrong": (70, {**FORECAST, **ROOM}),
    "a narrow forecast": (0, {"expected_ms": 40_000, "low_ms": 40_000, "high_ms": 40_100}),
    "it will be slowed down": (
        0,
        {
            **ROOM,
            "slowdown_brief": "would run next to eval.ipynb, about 1.4 times as long as alone (1.2 to 1.9)",
        },
    ),
    "without a forecast": (5, {"sentence": "the GPU is in use"}),
    "without a forecast, for long": (31, {"sentence": "the GPU is in use"}),
}


def tops() -> dict[str, TopView]:
    waiting = changed(SUSPENDED, lease_id="lease-3", label="", reserved_mib=0, busy=False, position=1)
    mine = changed(LEASE, lease_id="lease-2", label="eval.ipynb", fraction_milli=125, reserved_mib=10240, working=True)
    empty = replace(DEVICE, device_id="GPU-1", index=1, used_mib=0, reserved_mib=0, stranger_mib=0, draining=True)
    return {
        "%gpu top": TopView(host(LEASE, mine, waiting, devices=(DEVICE, empty)), "lease-1"),
        "%gpu top, a device that goes away": TopView(
            replace(
                host(
                    changed(LEASE, goes_away_in_ms=30_000, lost_because="it is too large"),
                    devices=(replace(DEVICE, draining=True, goes_away_in_ms=30_000, leases_saved=2, leases_lost=1),),
                ),
                goes_away_in_ms=90_000,
            ),
            "lease-1",
        ),
        "%gpu top, no device": TopView(host(devices=()), "lease-1"),
    }


def test_what_is_displayed_is_as_it_was_read() -> None:
    said = {f"%gpu status: {what}": repr(StatusView(status)) for what, status in STATUSES.items()}
    said |= {what: repr(view) for what, view in tops().items()}
    lines = [StoryLine(at_ms=NOW_MS - 1000 * each, reason="r", sentence=f"line {each}") for each in (9, 5, 1)]
    stories = {
        "%gpu explain --lines 2": StoryView(Story(lease_id="lease-1", lines=lines, omitted=4), 2, NOW_MS),
        "%gpu explain, slowed down": StoryView(
            Story(lease_id="lease-1", lines=lines, slowdown=STATUSES["slowed down"].slowdown), 20, NOW_MS
        ),
        "%gpu explain, nothing happened": StoryView(Story(lease_id="lease-1"), 20, NOW_MS),
    }
    said |= {what: re.sub(r"\d\d:\d\d:\d\d", "12:30:00", repr(view)) for what, view in stories.items()}
    histories = {"%gpu history": points(), "%gpu history, none": []}
    for what, line in histories.items():
        said[what] = re.sub(
            r"\d\d:\d\d(:\d\d)?",
            "12:30",
            repr(HistoryView(History(lease_id="lease-1", cap_mib=20480, points=line), now_ms=NOW_MS)),
        )
    costs = {
        "%gpu cost": COST,
        "%gpu cost, suspended, without carbon": replace(COST, now_milli=0, carbon="", budgets=[], month=COST.month[:1]),
        "%gpu cost, nothing used yet, a note": replace(
            COST, lease=[], today=[], month=[], note="The carbon figures are missing: no such file."
        ),
        "%gpu cost, no price, simulated": UNPRICED,
    }
    said |= {what: repr(CostView(cost)) for what, cost in costs.items()}
    for what, (seconds, fields) in WAITS.items():
        waiting = Progress(kind="waiting", **fields)  # type: ignore[arg-type]
        said[f"a cell waits: {what}"] = wait_text(waiting, waited_s=seconds, age_s=seconds)
    turn = Progress(kind="waiting", position=1, turn_ms=28_000, **FORECAST, **ROOM)  # type: ignore[arg-type]
    said["a running cell was preempted"] = wait_text(turn, waited_s=3, age_s=3, preempted=True)
    said["a larger share is waited for"] = resizing(LEASE)
    check_wording(GOLDEN / "views.txt", said)


SLIPS = (
    "%gpu supend",
    "%gpu status now",
    "%gpu request",
    "%gpu request 1/2 --pool big",
    "%gpu resize",
    "%gpu resize 3/2",
    "%gpu resize --memory lots",
    "%gpu pin forever",
    "%gpu pin 0",
    "%gpu history --last 0s",
    "%gpu explain --lines all",
    "%gpu help pim",
    "%gpu pin '30m",
    "%gpu measure",
    "%%gpu measure --setup one\n1",
    "%%gpu measure --setup 900\n1",
    "%%gpu measure --fast\n1",
    "%%gpu measure --within soon\n1",
    "%%gpu measure\n# nothing",
    "get_ipython().run_cell_magic('cpu', 'quiet', '1')",
)


def last_shown(kernel: RunningKernel, code: str, until: str) -> str:
    messages = kernel.until_shown(kernel.send(code), until)
    texts = [message["content"].get("data", {}).get("text/plain", "") for message in messages]
    return "\n".join(text for text in texts if text)


def test_what_the_magics_answer_is_as_it_was_read(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    broker.grant_at_once = True
    said = dict[str, str]()
    for line in SLIPS:
        kind, said[line.replace("\n", " / ")] = kernel.run(line).error
        assert kind == "UsageError", line
    assert not {"pin", "resize"} & set(broker.routes()), "a slip asks the broker nothing"
    said["%gpu help"] = kernel.run("%gpu help").printed
    said |= {f"%gpu help {name}": one.details for name, one in COMMANDS.items() if one.details}
    said["%%gpu --help"] = BURST.details
    said["%gpu help measure"] = MEASURE.details
    broker.lease_fields = {"pinned_ms": 1_800_000, "state": "resident"}
    said["%gpu pin"] = "\n".join(kernel.run("%gpu pin").shown)
    broker.lease_fields = {"pinned_ms": 7_200_000, "state": "suspended"}
    said["%gpu pin 2h, suspended"] = "\n".join(kernel.run("%gpu pin 2h").shown)
    broker.lease_fields = {}
    said["%gpu unpin"] = "\n".join(kernel.run("%gpu unpin").shown)
    said["%gpu resume"] = "\n".join(kernel.run("%gpu resume").shown)
    said["%gpu request 1/2"] = "\n".join(kernel.run("%gpu request 1/2").shown)
    said["%gpu resize 1/2 --later"] = last_shown(kernel, "%gpu resize 1/2 --later", "Its share is")
    said["%gpu suspend"] = last_shown(kernel, "%gpu suspend", "Suspended: ")
    said["%gpu release"] = last_shown(kernel, "%gpu release", "Released: ")
    broker.fail["suspend"] = ConflictError("host memory is short: 2 GiB is needed, 1 GiB is left")
    said["%gpu suspend, refused"] = last_shown(kernel, "%gpu suspend", "Not suspended: ")
    broker.fail = {
        "pin": ConflictError("a pin lasts 4 h at most here; given: 5 h"),
        "status": ForbiddenError("not yours"),
    }
    broker.fail["resize"] = NoRoomError("1 GPU is 80 GiB; pool default allows 1/2 at most")
    for line in ("%gpu pin 5h", "%gpu top", "%%gpu 1\npass"):
        said[f"{line.replace(chr(10), ' ')}, refused"] = ": ".join(kernel.run(line).error)
    broker.stop()
    said["%gpu, no broker"] = "\n".join(kernel.run("%gpu").shown).replace(broker.path, "/run/user/1000/broker.sock")
    said["%gpu cost, no broker"] = "\n".join(kernel.run("%gpu cost").shown).replace(
        broker.path, "/run/user/1000/broker.sock"
    )
    check_wording(GOLDEN / "magics.txt", said)
