"""Turns of leases on their devices, from the request to the end: waits, preemptions and withdrawals."""

from fractional_gpu.core.metering.meter import Holding
from fractional_gpu.core.metering.turns import Turn, TurnRecorder
from fractional_gpu.core.metering.usage import Party

IDLE = Holding(party=Party(pool="p"), milli=250, devices=("d",), device_mib=100)
WORKS = Holding(party=Party(pool="p"), milli=250, devices=("d",), busy=True, device_mib=100)
AWAY = Holding(party=Party(pool="p"), milli=250, suspended=True)


def test_a_cell_that_waits_and_runs() -> None:
    turns = TurnRecorder()
    turns.saw(10, "a", AWAY, asks=True, busy=True)
    turns.saw(12, "a", AWAY, asks=True, busy=True)  # it asks again: waiting since 10
    turns.saw(50, "a", WORKS, busy=True)
    turns.saw(70, "a", WORKS, busy=True, use_milli=300)
    turns.saw(90, "a", IDLE, busy=False, use_milli=300)
    assert turns.turns == [Turn("a", 10, 50, 90, 100, 300)]


def test_a_preempted_cell_is_two_turns_and_the_second_continues_the_first() -> None:
    turns = TurnRecorder()
    turns.saw(0, "a", WORKS, asks=True, busy=True)
    turns.saw(40, "a", AWAY, busy=True)
    turns.saw(60, "a", WORKS, busy=True)
    turns.saw(80, "a", IDLE, busy=False)
    turns.saw(100, "a", WORKS, asks=True, busy=True)
    turns.saw(110, "a", IDLE, busy=False)
    assert [(one.asked_ms, one.begun_ms, one.ended_ms, one.continues) for one in turns.turns] == [
        (0, 0, 40, False),
        (40, 60, 80, True),
        (100, 100, 110, False),
    ]


def test_a_cell_that_is_withdrawn_leaves_nothing_and_the_next_one_waits_from_its_own_beginning() -> None:
    turns = TurnRecorder()
    turns.saw(0, "a", AWAY, asks=True, busy=True)
    turns.saw(30, "a", AWAY, busy=False)
    turns.saw(50, "a", AWAY, asks=True, busy=True)
    turns.saw(60, "a", WORKS, busy=True)
    turns.saw(70, "a", None, busy=False)  # its process ended
    assert turns.turns == [Turn("a", 50, 60, 70, 0, 0)]
