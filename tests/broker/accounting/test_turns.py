"""What turns cost the broker at each event."""

from typing import Any, cast

from fractional_gpu.broker.accounting.metering import Turns
from fractional_gpu.broker.clock import Clocks
from fractional_gpu.core.events import BusyChanged
from tests.core.driving import Hand, pool
from tests.support.counted import calls_of


def calls_for_one_of(waiting: int) -> int:
    """Count the calls it takes to note that the last of this many waiting kernels now handles no request."""
    hand = Hand(pools=[pool(preempt_equals=True)])
    hand.run("runs")
    for number in range(waiting):
        hand.start(f"k{number}")
        hand.want(f"k{number}")
    last = f"k{waiting - 1}"
    assert hand.arbiter.ticket(last) is not None
    turns = Turns(hand.arbiter, cast("Any", None), Clocks(now=lambda: hand.now, wall=lambda: hand.now))
    return calls_of(lambda: turns.saw(BusyChanged(at_ms=hand.now, lease_id=last, busy=False), []))


def test_an_event_about_a_kernel_that_waits_costs_the_same_however_many_wait() -> None:
    assert calls_for_one_of(40) == calls_for_one_of(10)
