"""Removes each file that the product keeps on disk, one after another and all at once; every byte must come back.

    python tests/e2e/wiping.py [--only TEXT ...]

At rest and in the middle of a swap, with the broker alive and with the broker killed just before; one kernel is suspended and one
is resident. Afterwards each kernel's next cell must find its bytes, at once or after the command that the refusal names. Prints how
each case ended; exits with 1 if a byte was lost or a promise was broken.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fractional_gpu.protocol.errors import FractionalGPUError
from tests.support.wiping import CASES, new_stage, play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only cases that have this in their name"
    )
    only = parser.parse_args().only
    cases = [case for case in CASES if any(text in str(case) for text in only)]
    ended: Counter[str] = Counter()
    longest_s = 0.0
    for number, case in enumerate(cases, 1):
        try:
            with new_stage() as stage:
                outcome = play(case, stage)
        except (AssertionError, OSError, FractionalGPUError) as error:
            ended["broken"] += 1
            print(f"{number}/{len(cases)} {case}: BROKEN: {error}", flush=True)
            continue
        longest_s = max(longest_s, outcome.took_s)
        how = (
            f"by {' and '.join(f'`{command}`' for command in outcome.commands)}"
            if outcome.commands
            else "by the next cell"
        )
        ended["by a command" if outcome.commands else "by the next cell"] += 1
        print(f"{number}/{len(cases)} {case}: back {how} in {outcome.took_s:.1f} s", flush=True)
    print(f"{len(cases)} cases: {dict(ended)}; longest: {longest_s:.1f} s")
    return 1 if ended["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
