"""How long the first request to a suspended server takes (`jupyter gpu run --serve`), compared with the next one.

Everything between the client's connect and its answer counts: the runner's look at the port, the ticket, the swap, and the work itself.
"""

from collections.abc import Callable

from fractional_gpu.client.client import BrokerClient
from tests.benchmarks.report import Row
from tests.benchmarks.stats import median, median_estimate
from tests.support.ports import free_port
from tests.support.runs import SERVER, Run, intact
from tests.support.world import World

__all__ = ["measure_serving"]

_NAME = "served"


def measure_serving(world: World, times: int, say: Callable[[str], None]) -> list[Row]:
    """Suspend a server and send it two requests, `times` times. Raises RuntimeError if an answer is wrong."""
    port, firsts, nexts = free_port(), list[float](), list[float]()
    with (
        Run.python(world, _NAME, SERVER, str(port), options=("--serve", str(port))) as run,
        BrokerClient(world.socket) as broker,
    ):
        lease = run.lease()
        if lease is None:
            raise RuntimeError("the server has no lease")
        for number in range(times + 1):
            broker.suspend(lease.lease_id)
            (first, first_s), (then, next_s) = intact(port), intact(port)
            if (first, then) != ("intact\n", "intact\n"):
                raise RuntimeError(f"the server answered {first!r} and {then!r}: its bytes are not what they were")
            if number:  # the first swap starts the worker
                firsts.append(first_s)
                nexts.append(next_s)
    say(f"first request to a suspended server: {median(firsts):.3f} s, the next one {median(nexts):.3f} s")
    return [
        Row(
            measured="first request to a suspended server of 4 MiB",
            compared_with="the next request",
            unit="s",
            ours=median(firsts),
            theirs=median(nexts),
            compared=median_estimate([one - other for one, other in zip(firsts, nexts, strict=True)]),
            quotient=False,
            samples=len(firsts),
        )
    ]
