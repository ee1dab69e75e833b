"""What the broker adds to the driver's own calls in a suspend and in a resume, on the double of NVIDIA's driver.

    python tests/benchmarks/swap_overhead.py

A broker in its NVIDIA mode serves one idle kernel with the extension and a small buffer. The kernel is suspended and resumed through the
client; from the time of each round trip the time within the driver's checkpoint calls is subtracted. What is left is overhead, with
NVML's calls in it. The NVML latencies take turns, so that other work on the machine falls on all of them. The double's own times say
nothing about a GPU's speed.

Needs what `tests/run setup` makes. The table goes to stdout, progress to stderr.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.stats import median, percentile
from tests.benchmarks.swap_lane import CONTEXT_MIB, DEVICE_MIB, Sample
from tests.driver_double.double import Device, DriverDouble
from tests.support.paths import ROOT, SOURCES

_LANE = Path(__file__).with_name("swap_lane.py").resolve()
_LATENCIES_US = (0, 3000)
_KINDS = ("suspend", "resume")

Found = Mapping[int, Sequence[Sequence[Sample]]]
"""Rounds, each a suspend and a resume, by latency of NVML in microseconds."""


class Lane:
    """A broker and a kernel, in a separate process."""

    def __init__(self, double: DriverDouble, process: "subprocess.Popen[str]") -> None:
        self._double = double
        self._process = process

    def measure(self, latency_us: int, rounds: int) -> list[list[Sample]]:
        """Suspend and resume so often, with that latency of NVML. Raises RuntimeError if the process ended."""
        self._double.set(latency={"nvml": latency_us})
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{rounds}\n")
            self._process.stdin.flush()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the measurement ended; its output is above")
        found: list[list[Sample]] = json.loads(line)
        return found


@contextmanager
def open_lane(options: argparse.Namespace) -> Iterator[Lane]:
    """Start the process; it ends with the block. Raises RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="jgl-overhead-") as folder:
        packages = os.pathsep.join(str(ROOT / folder.name) for folder in SOURCES)
        double = DriverDouble(Path(folder, "host"), [Device(mib=DEVICE_MIB) for _ in range(options.devices)])
        double.set(context_mib=CONTEXT_MIB)
        environment = os.environ | double.environment()
        environment["PYTHONPATH"] = os.pathsep.join((packages, str(ROOT), environment["PYTHONPATH"]))
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-P", str(_LANE), str(double.folder), str(options.processes)]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            yield Lane(double, process)


def measure(lane: Lane, blocks: int, rounds: int) -> Found:
    """Return the rounds by latency, measured in turns."""
    found: dict[int, list[list[Sample]]] = {}
    for block in range(blocks):
        for latency_us in _LATENCIES_US:
            found.setdefault(latency_us, []).extend(lane.measure(latency_us, rounds))
        print(f"block {block + 1} of {blocks}", file=sys.stderr, flush=True)
    return found


def table(found: Found) -> str:
    """Return the medians and 95th percentiles as a table in Markdown."""
    lines = [
        "| step | an NVML call takes | median | 95th percentile | NVML calls | calls of the checkpoint worker |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for latency_us, rounds in sorted(found.items()):
        for what, samples in zip(_KINDS, zip(*rounds, strict=True), strict=True):
            times = [one["total_ms"] - one["driver_ms"] for one in samples]
            nvml = median([one["nvml_calls"] for one in samples])
            asked = median([one["checkpoint_calls"] for one in samples])
            lines.append(
                f"| {what} | {latency_us / 1000:g} ms | {median(times):.1f} ms | {percentile(times, 95):.1f} ms | {nvml:g} | {asked:g} |"
            )
    count = len(next(iter(found.values())))
    return "\n".join([*lines, "", f"{count} rounds each; load average {os.getloadavg()[0]:.1f}."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="devices of the host (default: 1)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="CUDA processes of the kernel's tree")
    parser.add_argument("--blocks", type=int, default=8, metavar="N", help="turns of each (default: 8)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="rounds in each turn (default: 8)")
    options = parser.parse_args(arguments)
    with open_lane(options) as lane:
        print(table(measure(lane, options.blocks, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
