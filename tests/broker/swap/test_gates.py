"""Before a suspend the kernel's gate closes, or shuts for its next cell, and the kernel's answer decides."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.swap import suspend as suspend_module
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.core.events import SuspendOutcome
from fractional_gpu.gpu.interface import GPUErrorCode
from fractional_gpu.protocol.messages import CELL_RUNS, NO_CELL_RUNS
from tests.broker.driver import Driver, journal, kernel_of, run_extension, suspend_of, swaps_of
from tests.broker.swap.kernels import CLOSES, S, room_for, running

pytestmark = pytest.mark.promise("race-unused-room", "deaf-kernels")


async def test_a_kernel_without_a_context_has_nothing_to_save_if_its_gate_is_shut_and_is_refused_if_it_has_none() -> (
    None
):
    for answers, outcome in ((CLOSES, SuspendOutcome.NOTHING_TO_SAVE), (None, SuspendOutcome.REFUSED)):
        async with kernel_of(1, answers) as (kernel, _, _pids):
            assert (await swaps_of(Driver()).suspend(kernel, suspend_of(kernel), journal([])))[0] is outcome


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"close": "busy"}, "a cell began to run"),
        ({"close": "what?"}, "a cell began to run"),
        ({"close": "hang up"}, "the kernel's extension closed its connection"),
        ({"close": "closed", "shrink": "busy"}, "the kernel's main loop was not idle"),
        ({"close": "closed", "shrink": "hang up"}, "the kernel's main loop was not idle"),
    ],
    ids=str,
)
async def test_a_gate_that_does_not_shut_leaves_the_kernel_untouched(answers: dict[str, str], says: str) -> None:
    driver = Driver()
    async with kernel_of(1, answers) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.ABORTED
    assert says in sentence
    assert driver.calls == []


class Counters:
    """Says whether a kernel was quiet, and counts how often it was asked."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.asked = 0

    async def __call__(self, _kernel: Kernel) -> bool:
        self.asked += 1
        return self.quiet


def impatient(driver: Driver, counters: Counters) -> Swaps:
    """Swaps that wait only briefly for a gate."""
    swaps = swaps_of(driver, gate_s=0.05)
    swaps.connect(roots=list, is_quiet=counters)
    return swaps


@pytest.mark.parametrize("linked", [True, False])
async def test_a_gate_that_does_not_answer_is_no_veto_once_the_counters_were_quiet(*, linked: bool) -> None:
    driver, counters = Driver(), Counters(quiet=False)
    async with kernel_of(1, {} if linked else None) as (kernel, _, pids):
        kernel.gated = True
        running(driver, pids)
        swaps = impatient(driver, counters)
        outcome, _, sentence = await swaps.suspend(kernel, suspend_of(kernel), journal([]))
        assert outcome is SuspendOutcome.ABORTED
        assert "is not responding" in sentence
        assert driver.calls == []
        counters.quiet = True
        outcome, saved_mib, sentence = await swaps.suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 300), sentence
    assert [name for name, _ in driver.calls] == ["lock", "checkpoint"]
    assert counters.asked == 2


async def test_a_gate_that_answers_needs_no_quiet_counters() -> None:
    driver, counters = Driver(), Counters(quiet=False)
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, _ = await impatient(driver, counters).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, counters.asked) == (SuspendOutcome.SAVED, 0)


async def test_a_kernel_whose_gate_does_not_answer_and_that_becomes_busy_is_let_go() -> None:
    driver = Driver()
    async with kernel_of(1, {}) as (kernel, quiet, pids):
        running(driver, pids)
        write = journal([], lambda phase: setattr(quiet, "busy", phase == "locking"))
        swaps = impatient(driver, Counters(quiet=True))
        outcome, _, sentence = await swaps.suspend(kernel, suspend_of(kernel), write)
    assert (outcome, sentence) == (SuspendOutcome.ABORTED, "the kernel became busy")
    assert driver.calls == [("lock", pids[0]), ("unlock", pids[0])]


class Stream:
    """Carries the commands, and says whether the extension has read them."""

    def __init__(self, *, read: bool | None) -> None:
        self.read = read

    def keep_alive(self) -> bool:
        return True

    def is_read(self) -> bool | None:
        return self.read


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (True, SuspendOutcome.NOTHING_TO_SAVE),
        (False, SuspendOutcome.REFUSED),
        (None, SuspendOutcome.REFUSED),
    ],
)
async def test_without_a_context_a_gate_that_does_not_answer_is_shut_if_it_has_read_the_command(
    read: bool | None,
    outcome: SuspendOutcome,
) -> None:
    driver = Driver()
    async with kernel_of(1, {}) as (kernel, _, _):
        assert kernel.link is not None
        kernel.link.stream = Stream(read=read)
        found, _, sentence = await impatient(driver, Counters(quiet=True)).suspend(
            kernel, suspend_of(kernel), journal([])
        )
    assert found is outcome, sentence


@pytest.mark.parametrize("answers", [{"preempt": "closed"}, None], ids=str)
async def test_a_preempted_kernel_is_saved_in_the_middle_of_its_cell(answers: dict[str, str] | None) -> None:
    driver, phases = Driver(), list[str]()
    async with kernel_of(2, answers) as (kernel, quiet, pids):
        running(driver, pids)
        quiet.busy = quiet.executing = quiet.runs_cell = True
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(
            kernel, suspend_of(kernel, preempt=True), journal(phases)
        )
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 600), sentence
    assert phases == ["locking", "checkpointing"]
    assert set(driver.states.values()) == {S.CHECKPOINTED}


@pytest.mark.parametrize("preempt", [True, False])
async def test_an_extension_that_comes_back_only_now_shuts_its_gate_before_the_kernel_is_saved(
    *, preempt: bool
) -> None:
    """Just after a broker's start it is not connected yet: a cell that passed the open gate would wait without being told why."""
    driver, asked = Driver(), list[str]()

    def word(verb: str) -> Callable[[], str]:
        def answer() -> str:
            asked.append(verb)
            assert driver.calls == []
            return "done" if verb == "shrink" else "closed"

        return answer

    async with kernel_of(1) as (kernel, quiet, pids), asyncio.TaskGroup() as tasks:
        kernel.gated = True
        running(driver, pids)
        quiet.busy = quiet.executing = quiet.runs_cell = preempt

        def come_back() -> None:
            link = kernel.connect_gate(0.0, [])
            tasks.create_task(run_extension(link, {verb: word(verb) for verb in ("close", "preempt", "shrink")}))

        asyncio.get_running_loop().call_soon(come_back)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel, preempt=preempt), journal([]))
        assert kernel.link is not None
        kernel.link.close()
    assert outcome is SuspendOutcome.SAVED, sentence
    assert asked == (["preempt"] if preempt else ["close", "shrink"])


async def test_a_preempted_kernel_whose_work_does_not_drain_goes_on() -> None:
    driver = Driver()
    async with kernel_of(2, {"preempt": "closed"}) as (kernel, quiet, pids):
        running(driver, pids)
        quiet.busy = True
        driver.failures["lock", sorted(pids)[1]] = GPUErrorCode.NOT_READY
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel, preempt=True), journal([]))
    assert outcome is SuspendOutcome.ABORTED
    assert "is still working on the GPU" in sentence
    assert set(driver.states.values()) == {S.RUNNING}, "a process was left locked"


async def test_a_busy_kernel_without_a_context_is_not_called_saved() -> None:
    async with kernel_of(1, {"preempt": "closed"}) as (kernel, quiet, _pids):
        quiet.busy = True
        assert (await swaps_of(Driver()).suspend(kernel, suspend_of(kernel, preempt=True), journal([])))[
            0
        ] is SuspendOutcome.REFUSED


async def test_a_busy_kernel_without_a_context_gives_its_room_back_if_its_cell_ends_soon() -> None:
    def preempt() -> str:
        quiet.busy = False  # the cell ends
        return f"closed: {NO_CELL_RUNS}"

    async with kernel_of(1, {"preempt": preempt}) as (kernel, quiet, _pids):
        quiet.busy = True
        outcome, _, sentence = await swaps_of(Driver()).suspend(kernel, suspend_of(kernel, preempt=True), journal([]))
    assert outcome is SuspendOutcome.NOTHING_TO_SAVE, sentence


@pytest.mark.parametrize(
    ("detail", "outcome"),
    [
        (CELL_RUNS, SuspendOutcome.ABORTED),
        (NO_CELL_RUNS, SuspendOutcome.NOTHING_TO_SAVE),
    ],
)
async def test_between_two_cells_no_other_cell_runs(detail: str, outcome: SuspendOutcome) -> None:
    async with kernel_of(1, {"preempt": f"closed: {detail}"}) as (kernel, _, _pids):
        effect = replace(suspend_of(kernel), between_cells=True)
        assert (await swaps_of(Driver()).suspend(kernel, effect, journal([])))[0] is outcome


@pytest.mark.parametrize("uses", [False, True])
async def test_a_cell_gives_up_room_that_it_never_used_and_keeps_what_it_begins_to_use(*, uses: bool) -> None:
    """Its kernel counts as idle, although the cell runs on behind the shut gate."""
    async with kernel_of(1, {"preempt": f"closed: {CELL_RUNS}"}) as (kernel, _, pids):
        kernel.cell.unused = frozenset({"request"})
        driver = Driver()
        if uses:
            driver.has_context(pids[0], S.RUNNING, 100)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is (SuspendOutcome.REFUSED if uses else SuspendOutcome.NOTHING_TO_SAVE), sentence
    assert driver.calls == []


@pytest.mark.promise("race-host-memory")
async def test_caches_are_given_back_before_host_memory_is_called_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(200, "the test"))
    driver = Driver()
    async with kernel_of(1, {**CLOSES, "shrink": lambda: shrink(driver)}) as (kernel, _, pids):
        driver.has_context(pids[0], S.RUNNING, 900)
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(
            kernel, suspend_of(kernel, host_mib=100), journal([])
        )
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 90), sentence


def shrink(driver: Driver) -> str:
    driver.mib = {pid: mib // 10 for pid, mib in driver.mib.items()}
    return "done"


async def test_an_idle_kernel_is_shrunk_without_being_suspended() -> None:
    driver = Driver()
    async with kernel_of(1, {"shrink": lambda: shrink(driver)}) as (kernel, quiet, pids):
        driver.has_context(pids[0], S.RUNNING, 900)
        assert await swaps_of(driver).shrink(kernel) == 90
        quiet.busy = True
        assert await swaps_of(driver).shrink(kernel) is None
    assert driver.calls == []


@pytest.mark.parametrize("answers", [None, {"shrink": "busy"}, {"shrink": "hang up"}], ids=str)
async def test_a_kernel_that_cannot_shrink_says_so(answers: dict[str, str] | None) -> None:
    driver = Driver()
    async with kernel_of(1, answers) as (kernel, _, pids):
        running(driver, pids)
        assert await swaps_of(driver).shrink(kernel) is None
