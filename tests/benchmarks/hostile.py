"""How much another user notices of a hostile user's attacks on the broker.

    python tests/benchmarks/hostile.py [--only NAME[:SIZE]] [--seconds 15] [--json FILE]
    python tests/benchmarks/hostile.py --combined [--minutes 2]        (tests/run hostile)

Each attack (`tests/support/attacks.py`) gets a fresh service with a simulated device. A user with another uid pings the broker and runs two
programs that take turns on the device, first alone and then under the attack. The bounds within one run: a ping's median grows at most 10
times, a cell's at most 3 times and to 2 s, the broker's memory at most doubles, no restart, no wrong byte. `spin` is no attack: it only
computes, and shows what the scheduler does to others.

Combined: three users make all attacks at once while eight programs of a fourth one swap; no restart, no wrong byte.

Needs root, because it acts as several users. Exits with 1 if a bound is broken.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.stats import median, percentile
from tests.support.hostile import ATTACKERS, Figures, User, attacking, service, user

__all__ = ["PLANS", "Result", "broken"]

PLANS: Final = (
    ("spin:1", 1),
    ("environ:200", 1),
    ("environ-lease", 1),
    ("slow-bodies:1", 1),
    ("slow-bodies:200", 1),
    ("slow-bodies:1900", 1),
    ("json:20", 1),
    ("json:1000", 1),
    ("json-attach:200", 1),
    ("iopub:1000000", 1),
    ("iopub:60000", 1),
    ("capacity:400", 1),
    ("capacity:400", 5),
    ("refused:400", 1),
    ("others:400", 1),
    ("ledger:4", 1),
    ("connects:100", 1),
    ("heads:400", 1),
    ("pipelined:50", 1),
    ("gates:200", 1),
    ("events:400", 1),
)
"""The attacks, each with the number of uids, of one user, that make it."""
_COMBINED: Final = (
    ("environ:200", "slow-bodies:1900", "json:1000", "capacity:400", "ledger:4", "events:400"),
    ("environ-lease:1024", "slow-bodies:200", "json-attach:200", "others:400", "connects:100", "pipelined:50"),
    ("iopub:1000000", "json:20", "refused:400", "heads:400", "gates:200"),
)
_IDLE_S: Final = 8.0
_PATIENCE_S: Final = 60.0  # for what is under way when the time is over; then the attack ends
_RECOVERY_S: Final = 180.0  # and for what could not be finished before
_PING_TIMES, _CELL_TIMES, _CELL_MORE_S, _MEMORY_TIMES = 10.0, 3.0, 2.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the user noticed, seconds, and the broker's peak of memory, MiB, before (`idle`) and under the attack."""

    attack: str
    idle: Figures
    under: Figures
    idle_mib: float
    under_mib: float
    restarted: bool
    grown_bytes: int  # of the broker's state folder
    got: list[dict[str, Any]]  # by the attackers, one for each


def broken(result: Result) -> list[str]:
    """Name the bounds that the result breaks."""
    idle, under = result.idle, result.under
    checks = {
        "ping": median(under.ping_s) > _PING_TIMES * median(idle.ping_s),
        "cell": median(under.cell_s) > _CELL_TIMES * median(idle.cell_s) + _CELL_MORE_S,
        "memory": result.under_mib > _MEMORY_TIMES * result.idle_mib,
        "restart": result.restarted,
        "bytes": bool(under.wrong),
    }
    return [name for name, wrong in checks.items() if wrong]


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def measure(name: str, users: int, seconds: float) -> Result:
    """Measure one attack by `users` uids, which count as one user."""
    with service(one_account=users > 1) as broker, user(broker) as one:
        broker.forget_peak()
        idle = _used(one, _IDLE_S)
        if idle is None or not idle.cell_s:
            raise RuntimeError(f"the user gets nothing even without an attack\n{broker.log()}")
        idle_mib, before, had_bytes = broker.peak_mib, broker.identity(), broker.state_bytes()
        broker.forget_peak()
        with ExitStack() as stack:
            got = [stack.enter_context(attacking(broker.socket, name, uid=uid)) for uid in ATTACKERS[:users]]
            under = _used(one, seconds)
        under = under or one.figures(_RECOVERY_S)
        if under is None:
            raise RuntimeError(f"{name}: the user still waits after the attack\n{broker.log()}")
        return Result(
            attack=name if users == 1 else f"{name}, {users} uids",
            idle=idle,
            under=under,
            idle_mib=idle_mib,
            under_mib=broker.peak_mib,
            restarted=broker.identity() != before,
            grown_bytes=broker.state_bytes() - had_bytes,
            got=[tally for one_got in got for tally in one_got.values()],
        )


def _used(one: User, seconds: float) -> Figures | None:
    """Return the figures of that many seconds; None if what runs at their end takes too long."""
    one.go()
    time.sleep(seconds)  # how long is measured, not a synchronisation
    one.stop()
    return one.figures(_PATIENCE_S)


_HEADER: Final = (
    *(
        "attack",
        "ping, idle",
        "ping",
        "ratio",
        "ping p90",
        "longest ping",
        "cell, idle",
        "cell",
        "longest cell",
    ),
    *("memory, idle", "memory", "restarted", "broken bounds"),
)


def as_table(results: Sequence[Result]) -> str:
    """Return a markdown table."""
    lines = [_HEADER, tuple("---" for _ in _HEADER), *map(_cells, results)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(result: Result) -> tuple[str, ...]:
    idle, under = result.idle, result.under
    return (
        f"`{result.attack}`",
        _ms(median(idle.ping_s)),
        _ms(median(under.ping_s)),
        f"{median(under.ping_s) / median(idle.ping_s):.1f} x",
        _ms(percentile(under.ping_s, 90)),
        _ms(max(under.ping_s)),
        f"{median(idle.cell_s):.2f} s",
        f"{median(under.cell_s):.2f} s",
        f"{max(under.cell_s):.2f} s",
        f"{result.idle_mib:.0f} MiB",
        f"{result.under_mib:.0f} MiB",
        "yes" if result.restarted else "no",
        ", ".join(broken(result)) or "none",
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _describe_got(result: Result) -> str:
    leases = sum(tally.get("leases", 0) for tally in result.got)
    grown = f"; the state folder grew by {result.grown_bytes} bytes" + (
        f", {result.grown_bytes / leases:.0f} for each of {leases} leases" if leases else ""
    )
    return f"{result.attack}: {json.dumps(result.got)}{grown}"


def run_combined(minutes: float) -> list[str]:
    """Have three users make all attacks, and print the figures. Returns what is broken."""
    with service("2x1GiB") as broker, user(broker, programs=8, threads=4) as one:
        broker.forget_peak()
        before = broker.identity()
        with ExitStack() as stack:
            got = [
                stack.enter_context(attacking(broker.socket, *names, uid=uid, begun=False))
                for uid, names in zip(ATTACKERS, _COMBINED, strict=False)
            ]
            figures = _used(one, 60 * minutes)
        figures = figures or one.figures(_RECOVERY_S)
        if figures is None:
            return [f"the user still waits after the attack\n{broker.log()}"]
        for tallies in got:
            for name, tally in tallies.items():
                _say(f"{name}: {json.dumps(tally)}")
        print(
            f"{len(figures.cell_s)} cells, {figures.swaps} suspends, {figures.wrong} programs without all their bytes; a cell "
            f"{_spread(figures.cell_s)}; a ping {_spread(figures.ping_s)}; what had to be repeated: {figures.failed}; the broker's peak of "
            f"memory {broker.peak_mib:.0f} MiB"
        )
        return ["restart"] * (broker.identity() != before) + ["bytes"] * bool(figures.wrong)


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    return f"p50 {median(seconds):.3f} s, p90 {percentile(seconds, 90):.3f} s, longest {max(seconds):.1f} s"


def _circumstances() -> str:
    return f"Tornado {version('tornado')}; {os.cpu_count()} CPUs; load average {os.getloadavg()[0]:.1f}."


def main() -> int:
    """Measure, print the figures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="NAME[:SIZE]", action="append", help="attacks, of the plan or of another size"
    )
    parser.add_argument(
        "--users", type=int, default=1, help="how many uids of one user make an attack that is not in the plan"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each attack lasts (default 15)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers here")
    parser.add_argument("--combined", action="store_true", help="all attacks at once, by three users")
    parser.add_argument("--minutes", type=float, default=2.0, help="how long the combined attack lasts (default 2)")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("this acts as several users, which takes root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # clears up, as Ctrl-C does
    if options.combined:
        found = run_combined(options.minutes)
        print(f"broken: {', '.join(found) or 'nothing'}. {_circumstances()}")
        return bool(found)
    plans = [plan for plan in PLANS if not options.only or {plan[0], plan[0].partition(":")[0]} & set(options.only)]
    plans = plans or [(name, options.users) for name in options.only]
    results, stuck = list[Result](), False
    for name, users in plans:
        try:
            result = measure(name, users, options.seconds)
        except RuntimeError as error:
            stuck = True
            _say(str(error))
            continue
        results.append(result)
        _say(_describe_got(result))
        _say(" | ".join(_cells(result)))
    print(f"{as_table(results)}\n\n{_circumstances()}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results]) + "\n", encoding="utf-8")
    return stuck or any(broken(result) for result in results)


if __name__ == "__main__":
    sys.exit(main())
