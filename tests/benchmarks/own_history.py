"""How exact a broker's record is: simulated days, recorded by the broker's recorder and run again on the same devices.

    python -m tests.benchmarks.own_history

The table compares the recorded waits with the waits of `jupyter gpu simulate --from-ledger`.
"""

import io
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fractional_gpu.commands.main import main as command
from tests.support.own_history import ledger_of

DAYS = (
    ("`--users 24 --set several_gpus=0 --set pace=short`", "--users 24 --set several_gpus=0 --set pace=short", 4),
    ("the same, overloaded", "--users 24 --set several_gpus=0 --set pace=short", 2),
    ("`--users 30 --set habit=builders`", "--users 30 --set habit=builders", 2),
)


def figures(*words: str) -> dict[str, Any]:
    """Run `jupyter gpu simulate` with these words; return its figures."""
    with redirect_stdout(io.StringIO()) as printed:
        if command(["simulate", *words, "--json"]) != 0:
            raise SystemExit(f"jupyter gpu simulate {' '.join(words)} failed")
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def row(name: str, load: str, devices: int, folder: Path) -> str:
    """Return the row of one day."""
    machine, log = ("--devices", f"{devices}x80GiB"), folder / "run.log"
    first = figures(*load.split(), *machine, "--set", f"record={log}")
    folder.joinpath("state").mkdir(mode=0o700)
    again = figures("--from-ledger", str(ledger_of(log, folder / "state" / "ledger.sqlite")), *machine)
    recorded = again["recorded"]
    waits = [f"{recorded['wait_s'][name]:.3g} s, {again['wait_s'][name]:.3g} s" for name in ("p95", "p99")]
    waited = f"{recorded['waited_percent']:.1f} %, {again['waited_percent']:.1f} %"
    cells = f"{first['gpu_cells']}, {again['gpu_cells']}"
    return f"| {name} | {devices} | {cells} | {' | '.join(waits)} | {waited} | {recorded['mean_error_s']:.2g} s |"


def main() -> int:
    """Print the table."""
    print("| day | devices | cells | p95 wait: recorded, again | p99 | cells that waited | apart in the mean |")
    print("|---|---|---|---|---|---|---|")
    for name, load, devices in DAYS:
        with tempfile.TemporaryDirectory(prefix="jgl-history-") as folder:
            print(row(name, load, devices, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
