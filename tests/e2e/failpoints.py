"""Kills a process at every point that a story reaches, one after another: at the first time, and at the last.

    python tests/e2e/failpoints.py [--only PREFIX ...] [--full-disk]

The point's first word names the process: the broker (api, event, ledger, link), its checkpoint worker (worker), a kernel (kernel)
or a Jupyter server that keeps its kernels (server). With --full-disk the broker survives and each write to the ledger fails
instead: the first, the second, and so on.

After each death every surviving kernel must answer with its bytes intact, an interrupted action must succeed when repeated, the
books and the driver must agree, nothing may be granted twice and nothing may be left over. Prints each point and how long its
story took, and the existing points that no story reaches. Exits with 1 at the first broken promise, or if there are such points.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.dying import Story, Strike, points_of
from tests.support.points import known_points, plain
from tests.support.steered import SteeredStory
from tests.support.world import new_world

_SERVERS = "server."


@dataclass
class Figures:
    struck: int = 0
    missed: int = 0


def _is_write(point: str) -> bool:
    return point.startswith("ledger.") and point.endswith(".unfinished")


def run(
    kind: type[Story], only: tuple[str, ...], *, full_disk: bool, keeps: bool, told: set[str], figures: Figures
) -> None:
    """Repeat the story in one world, skipping points from earlier stories.

    A point is a place in the code and the lease's state, such as `event.Wanted@suspended.before`. Adds the reached points to `told`.
    """
    with new_world(kind.simulate) as world:
        story = kind(world, keeps=keeps)
        try:
            reached = points_of(story)
            cases = [
                (point, number)
                for point, times in sorted(reached.items())
                if _is_wanted(kind, point, only, keeps=keeps) and (_is_write(point) if full_disk else point not in told)
                for number in (range(1, times + 1) if full_disk else sorted({1, times}))
            ]
            for place, (point, number) in enumerate(cases, 1):
                begun_s = time.monotonic()
                died = bool(story.tell(Strike(point, number, "fail" if full_disk else "kill")))
                figures.struck, figures.missed = figures.struck + died, figures.missed + (not died)
                words = ("failed" if full_disk else "died") if died else "not reached this time"
                took_s = time.monotonic() - begun_s
                print(f"{place}/{len(cases)} {point} ({number}): {words}, {took_s:.1f} s", flush=True)
        except BaseException:
            for name, text in world.logs().items():
                print(f"--- {name} ---\n{text}", file=sys.stderr)
            raise
        finally:
            story.close()
    told |= {point for point in reached if keeps is point.startswith(_SERVERS)}


def _is_wanted(kind: type[Story], point: str, only: tuple[str, ...], *, keeps: bool) -> bool:
    """Servers die where they keep their kernels; in the story of a user's commands only the broker and its worker die."""
    if kind is SteeredStory and point.startswith((_SERVERS, "kernel.")):
        return False
    return point.startswith(only) and point.startswith(_SERVERS) is keeps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="only points whose name begins so, such as ledger.")
    parser.add_argument("--full-disk", action="store_true", help="let the Nth write of each kind fail, N = 1, 2, ...")
    options = parser.parse_args()
    only = tuple(options.only)
    figures = Figures()
    told: set[str] = set()
    for kind, keeps in ((Story, False), (SteeredStory, False), (Story, True)):
        if any(begin.startswith(_SERVERS) is keeps or _SERVERS.startswith(begin) for begin in only):
            run(kind, only, full_disk=options.full_disk, keeps=keeps, told=told, figures=figures)
    what = "failed writes" if options.full_disk else "deaths"
    print(f"{figures.struck} {what}, no byte lost; {figures.missed} points were not reached again")
    if "" not in only or options.full_disk:
        return 0
    unreached = sorted(known_points() - {plain(point) for point in told})
    print(f"{len(unreached)} points that no story reaches: {', '.join(unreached) or 'none'}")
    return 1 if unreached else 0


if __name__ == "__main__":
    raise SystemExit(main())
