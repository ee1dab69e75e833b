"""The broker dies at every point that a story reaches, one after the other: at its first time, and at the last.

    python tests/e2e/failpoints.py [--only PREFIX]

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


def main() -> int:
    """Run the matrix and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only points whose name begins so, such as ledger.")
    options = parser.parse_args()
    with new_world(SIMULATE) as world:
        story = Story(world)
        try:
            struck = missed = 0
            cases = [
                (point, number)
                for point, times in sorted(points_of(story).items())
                if point.startswith(options.only)
                for number in sorted({1, times})
            ]
            for place, (point, number) in enumerate(cases, 1):
                begun_s = time.monotonic()
                died = story.tell(point, number)
                struck, missed = struck + died, missed + (not died)
                words = "died" if died else "not reached this time"
                print(
                    f"{place}/{len(cases)} {point} ({number}): {words}, {time.monotonic() - begun_s:.1f} s", flush=True
                )
        except BaseException:
            for name, text in world.logs().items():
                print(f"--- {name} ---\n{text}", file=sys.stderr)
            raise
        finally:
            story.close()
    print(f"{struck} deaths, no byte lost; {missed} points were not reached again")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
