"""The broker dies at every point that a story reaches, one after the other: at its first time, and at the last.

    python tests/e2e/failpoints.py [--only PREFIX] [--full-disk]

With --full-disk it lives on, and each write to the ledger fails instead: the first, the second, and so on.

After each death every kernel must answer with its bytes intact, books and driver must agree, nothing may be granted twice and nothing
may stay behind. Prints each point and how long its story took. Exits with 1 at the first broken promise.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.dying import SIMULATE, Story, points_of
from tests.support.world import new_world


def _is_write(point: str) -> bool:
    return point.startswith("ledger.") and point.endswith(".unfinished")


def main() -> int:
    """Run the matrix and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only points whose name begins so, such as ledger.")
    parser.add_argument("--full-disk", action="store_true", help="let the Nth write of each kind fail, N = 1, 2, ...")
    options = parser.parse_args()
    with new_world(SIMULATE) as world:
        story = Story(world)
        try:
            struck = missed = 0
            cases = [
                (point, number)
                for point, times in sorted(points_of(story).items())
                if point.startswith(options.only) and (not options.full_disk or _is_write(point))
                for number in (range(1, times + 1) if options.full_disk else sorted({1, times}))
            ]
            for place, (point, number) in enumerate(cases, 1):
                begun_s = time.monotonic()
                died = story.tell(point, number, action="fail" if options.full_disk else "kill")
                struck, missed = struck + died, missed + (not died)
                words = ("failed" if options.full_disk else "died") if died else "not reached this time"
                print(
                    f"{place}/{len(cases)} {point} ({number}): {words}, {time.monotonic() - begun_s:.1f} s", flush=True
                )
        except BaseException:
            for name, text in world.logs().items():
                print(f"--- {name} ---\n{text}", file=sys.stderr)
            raise
        finally:
            story.close()
    print(
        f"{struck} {'failed writes' if options.full_disk else 'deaths'}, no byte lost; {missed} points were not reached again"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
