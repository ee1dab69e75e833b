"""The demonstration's results, as a table for people and as JSON for programs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fractional_gpu.commands.terminal.render import describe_device, table
from fractional_gpu.core.units import format_fraction, format_memory
from fractional_gpu.protocol.states import state_words

__all__ = ["DemoDevice", "DemoKernel", "find_problems", "render_report", "report_as_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoDevice:
    """The GPU that was shared. Memory in MiB."""

    name: str
    simulated: bool
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoKernel:
    """The result of one kernel. `state` is the lease's at the end; `moved_s` seconds its memory was on the move."""

    name: str
    kernelspec: str
    fraction_milli: int
    state: str
    suspends: int
    resumes: int
    moved_s: float
    compared_bytes: int
    state_intact: bool


def find_problems(kernels: Sequence[DemoKernel]) -> list[str]:
    """Return a sentence for each broken promise; an empty list is a success."""
    wrong = [f"{kernel.name} lost state" for kernel in kernels if not kernel.state_intact]
    still = [kernel for kernel in kernels if not kernel.suspends or not kernel.resumes]
    return wrong + [
        f"{kernel.name} was suspended {kernel.suspends} and resumed {kernel.resumes} times: nothing was shown"
        for kernel in still
    ]


def report_as_json(device: DemoDevice, kernels: Sequence[DemoKernel]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "device": {"name": device.name, "simulated": device.simulated, "memory_mib": device.memory_mib},
        "kernels": [
            {
                "kernelspec": kernel.kernelspec,
                "fraction_milli": kernel.fraction_milli,
                "suspends": kernel.suspends,
                "resumes": kernel.resumes,
                "state_intact": kernel.state_intact,
            }
            for kernel in kernels
        ],
        "ok": not find_problems(kernels),
    }


def render_report(device: DemoDevice, kernels: Sequence[DemoKernel]) -> str:
    """Return the table and the conclusion, ending in a newline."""
    header = ("KERNEL", "GPU", "STATE", "SUSPENDED", "RESUMED", "MOVING", "COMPARED", "INTACT")
    rows = [
        (
            kernel.name,
            format_fraction(kernel.fraction_milli),
            state_words(kernel.state),
            f"{kernel.suspends} times",
            f"{kernel.resumes} times",
            f"{kernel.moved_s:.1f} s",
            format_memory(kernel.compared_bytes // 2**20),
            "yes" if kernel.state_intact else "NO",
        )
        for kernel in kernels
    ]
    wrong = find_problems(kernels)
    asked = sum(kernel.fraction_milli for kernel in kernels)
    good = f"Together they asked for {format_fraction_sum(asked)} GPUs, and every byte is where it was."
    conclusion = "Something is wrong: " + "; ".join(wrong) + "." if wrong else good
    return (
        "\n".join(
            [
                describe_device(device.name, device.memory_mib, simulated=device.simulated),
                *table(header, rows),
                conclusion,
            ]
        )
        + "\n"
    )


def format_fraction_sum(milli: int) -> str:
    """Return `1.5` for 1500: a sum of fractions may exceed a GPU."""
    return f"{milli / 1000:g}"
