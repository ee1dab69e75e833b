"""What `%gpu` understands, as data: the parser, the help and the completion are all made from this table.

Nothing of it is needed before somebody types `%gpu`, so it is imported then.
"""

from typing import NamedTuple

__all__ = ["ALWAYS", "BURST", "COMMANDS", "FRACTIONS", "Argument", "Command"]

ALWAYS = "always"
FRACTIONS = ("1/8", "1/4", "1/2", "3/4", "1")
_PINS = ("15m", "30m", "1h", "2h", ALWAYS)
_SPANS = ("10m", "1h", "1d")


class Argument(NamedTuple):
    """An argument or an option (with dashes). `values` are proposals; `kind` names those that are made when they are asked for."""

    name: str
    metavar: str
    help: str
    values: tuple[str, ...] = ()
    kind: str = ""  # "memory", "fraction", "pool" or "command"
    required: bool = False

    @property
    def is_option(self) -> bool:
        """Whether it is written with its name."""
        return self.name.startswith("--")

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.is_option and not self.metavar


class Command(NamedTuple):
    """One word after `%gpu`."""

    name: str
    summary: str
    arguments: tuple[Argument, ...] = ()
    details: str = ""


def _fraction(*, required: bool) -> Argument:
    return Argument(
        "fraction", "FRACTION", "share of a GPU: 1/4, 0.25 or 250m; 1 is a whole one", (), "fraction", required
    )


_MEMORY = Argument(
    "--memory", "SIZE", "device memory, such as 20GiB (default: the fraction's share of the device)", (), "memory"
)
_POOL = Argument(
    "--pool", "NAME", "the pool of this kernel; another one needs a restart with another kernelspec", (), "pool"
)
_LATER = Argument("--later", "", "ask when this cell is over, so that an idle kernel may also move to another GPU")

COMMANDS = {
    command.name: command
    for command in (
        Command("status", "this kernel's share of a GPU, and its neighbours (also: nothing)"),
        Command(
            "request",
            "wait until this kernel is on a GPU with this share",
            (_fraction(required=True), _MEMORY, _POOL),
            "Changes the share as `resize` does, then waits for the GPU as a cell would. Interrupt the kernel to stop waiting: "
            "what has been granted by then stays.",
        ),
        Command(
            "resize",
            "give this kernel another share without a restart",
            (_fraction(required=False), _MEMORY, _LATER),
            "A larger share waits for room beside the neighbours on this GPU; idle ones step aside. A smaller one must hold what is in "
            "use. Interrupt the kernel to stop waiting: the share stays as it was.",
        ),
        Command("suspend", "save its GPU memory to host memory and free the GPU, when this cell is over"),
        Command("resume", "wait until this kernel is on a GPU again"),
        Command(
            "pin",
            "keep this kernel on the GPU for a while, idle or not",
            (Argument("duration", "DURATION", "how long, such as 30m or 2h, or `always` (default: 30m)", _PINS),),
            "The pool limits how long one pin may last and how much of a day a user may pin; a refusal says what is left. `always` pins "
            "for half an hour (or what the pool allows) and renews that until %gpu unpin, until the kernel ends, or until the budget "
            "is spent, which is said at the next cell. Draining a device and the limits of an administrator go before pins.",
        ),
        Command("unpin", "end the pin; what is left of it goes back to the budget"),
        Command(
            "release",
            "give the GPU back when this cell is over",
            (),
            "Ends a pin, and lets go of the device memory that is reserved for this kernel. What it holds there is saved to host memory "
            "first, as `suspend` does, and comes back with the next cell that needs it; without such state the reservation is just "
            "dropped. The share itself stays this kernel's; shutting the kernel down ends it.",
        ),
        Command("top", "the GPUs of this machine, and who is on them (others without their names)"),
        Command(
            "history",
            "this kernel's memory and its time on the GPU",
            (Argument("--last", "DURATION", "only the last so much, such as 1h (default: all there is)", _SPANS),),
        ),
        Command(
            "explain",
            "why everything happened to this kernel's share, newest last",
            (Argument("--lines", "N", "so many of the newest (default: 20)", ("20", "100")),),
        ),
        Command("help", "this list, or one command", (Argument("command", "COMMAND", "the command", (), "command"),)),
    )
}

BURST = Command(
    "",
    "run this cell with a larger share, and give it back at the cell's end",
    (_fraction(required=True), _MEMORY),
    "The cell waits until its share is there, as for the GPU. A share that is not larger than the kernel's own changes nothing. The "
    "share is given back also if the cell fails or is interrupted; if more memory is still in use than the kernel's own share "
    "holds, that is said, and tried again after each cell.",
)
