"""The arguments of `%gpu`. A single table of commands is used for parsing, help and completion. Each error is one sentence."""

import argparse
import os
import re
import shlex
import time
from typing import Any, NamedTuple, NoReturn

from fractional_gpu.core.units import (
    format_fraction,
    format_memory,
    parse_duration_ms,
    parse_fraction_milli,
    parse_memory_mib,
)
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.status import HostStatus
from fractional_gpu_kernel.memory import DEVICE
from fractional_gpu_kernel.settings import Settings

ALWAYS = "always"
FRACTIONS = ("1/8", "1/4", "1/2", "3/4", "1")
_PINS = ("15m", "30m", "1h", "2h", ALWAYS)
_SPANS = ("10m", "1h", "1d")


class Argument(NamedTuple):
    """An argument, or an option if its name begins with dashes. Completions come from `values`, or are computed according to `kind`."""

    name: str
    metavar: str
    help: str
    values: tuple[str, ...] = ()
    kind: str = ""  # "memory", "fraction", "pool" or "command"
    required: bool = False
    repeatable: bool = False

    @property
    def is_option(self) -> bool:
        return self.name.startswith("--")

    @property
    def is_flag(self) -> bool:
        return self.is_option and not self.metavar


class Command(NamedTuple):
    name: str
    summary: str
    arguments: tuple[Argument, ...] = ()
    details: str = ""


def _fraction(*, required: bool) -> Argument:
    return Argument(
        "fraction", "FRACTION", "share of a GPU: 1/4, 0.25 or 250m; 1 is a whole GPU", (), "fraction", required
    )


_MEMORY = Argument(
    "--memory", "SIZE", "device memory, such as 20GiB (default: the fraction's share of the device)", (), "memory"
)
_POOL = Argument("--pool", "NAME", "this kernel's pool; to change it, restart with another kernelspec", (), "pool")
_LATER = Argument("--later", "", "do it after this cell, when the kernel is idle and can also move to another GPU")
COMMANDS = {
    command.name: command
    for command in (
        Command("status", "this kernel's share of a GPU, and its neighbours (the default)"),
        Command(
            "request",
            "wait until this kernel is on a GPU with this share",
            (_fraction(required=True), _MEMORY, _POOL),
            "Changes the share as `resize` does, then waits for the GPU as a cell would. Interrupt the kernel to stop waiting; it "
            "keeps what it has been granted so far.",
        ),
        Command(
            "resize",
            "change this kernel's share without restarting it",
            (_fraction(required=False), _MEMORY, _LATER),
            "A larger share waits for room on this GPU; idle neighbours make room. A smaller share must be large enough for the "
            "memory in use. Interrupt the kernel to stop waiting; the share then stays the same.",
        ),
        Command("suspend", "save its GPU memory to host memory and free the GPU, after this cell"),
        Command("resume", "wait until this kernel is on a GPU again"),
        Command(
            "pin",
            "keep this kernel on the GPU for a while, idle or not",
            (Argument("duration", "DURATION", "how long, such as 30m or 2h, or `always` (default: 30m)", _PINS),),
            "The pool limits how long one pin may last and how long a user may pin per day; a refusal shows the remaining time. `always` "
            "pins for half an hour (or what the pool allows) and renews that until %gpu unpin, until the kernel ends, or until the "
            "budget is spent, which is shown at the next cell. Draining a device and an administrator's limits override pins.",
        ),
        Command("unpin", "end the pin; the remaining time goes back to the budget"),
        Command(
            "release",
            "release the GPU after this cell",
            (),
            "Ends a pin, and frees the device memory reserved for this kernel. Any data there is first saved to host memory, as with "
            "`suspend`, and restored for the next cell that needs it. The kernel keeps its share until it is shut down.",
        ),
        Command(
            "note",
            "set or show a note about this kernel, for you and administrators",
            (
                Argument("text", "TEXT", 'the note; "" removes it'),
                Argument("--clear", "", "remove the note"),
            ),
            "`%gpu` and `jupyter gpu status` show the note for as long as the kernel has its share, even after restarts.",
        ),
        Command("top", "the GPUs of this machine and the kernels on them (other users' without names)"),
        Command(
            "history",
            "this kernel's memory and its time on the GPU",
            (Argument("--last", "DURATION", "how far back to show, such as 1h (default: everything)", _SPANS),),
        ),
        Command(
            "cost",
            "the cost of this kernel, and of all your kernels today and this month",
            (),
            "The cost is in money if the pool has a price, and otherwise in GPU hours. It is compared with the cost of whole GPUs, "
            "and with what suspending saved.",
        ),
        Command(
            "explain",
            "what happened to this kernel's share and why, newest last",
            (Argument("--lines", "N", "how many of the newest lines (default: 20)", ("20", "100")),),
        ),
        Command(
            "help",
            "show this list, or help for one command",
            (Argument("command", "COMMAND", "the command", (), "command"),),
        ),
    )
}
BURST = Command(
    "",
    "run this cell with a larger share, and give it back afterwards",
    (_fraction(required=True), _MEMORY),
    "The cell waits for the share as it would for the GPU. A share that is not larger than the kernel's own has no effect. The share "
    "is given back even if the cell fails or is interrupted. If the kernel still uses more memory than its own share allows, the "
    "cell says so, and the kernel tries again after each cell.",
)


MEASURE = Command(
    "measure",
    "measure how large a share of a GPU this cell needs",
    (
        Argument("--setup", "CELLS", "numbers of earlier cells to run first, once in each process, such as 1-3,5"),
        Argument("--from-start", "", "also measure starting the process and the setup: all of it is one unit of work"),
        Argument("--within", "DURATION", "maximum duration (default: 5m)", ("2m", "5m", "10m")),
        Argument(
            "--fractions",
            "F,...",
            "shares to compare, each on a device full of copies (default: all on offer)",
            (),
            "fraction",
        ),
        Argument(
            "--copies",
            "N,...",
            "instead of --fractions: numbers of copies to run alongside, each with the largest share that fits",
            ("1", "1,2,3"),
        ),
        Argument("--neighbour", "COMMAND", "a program to run alongside instead of copies; repeatable", repeatable=True),
        _MEMORY,
        Argument("--pool", "NAME", "the pool of devices (default: this kernel's)", (), "pool"),
        Argument("--interval", "PERCENT", "maximum width of an interval (default: 5%)"),
        Argument("--at-most", "PERCENT", "acceptable slowdown of a share (default: 10%)"),
        Argument("--may-wait", "", "wait for room as other programs do, instead of using only spare room"),
    ),
    "The cell runs repeatedly in separate processes, each with its own share, never in this kernel. It sees only the notebook "
    "variables that the cells in --setup define. Each run is a unit of work, unless the cell reports units itself: from "
    "fractional_gpu_kernel.measure import tick. Interrupt the kernel to stop; the results so far are shown.",
)
MEASURE_NAME = "%%gpu measure"


class ArgumentsError(Exception):
    """Raised if the arguments are invalid. The message says what is allowed."""


class HelpRequested(Exception):  # noqa: N818 - not an error
    """Raised if the user requests help with `-h`. The message is the help text."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises errors instead of exiting the kernel."""

    def __init__(self, prog: str, command: Command) -> None:
        text = f"{command.summary[:1].upper()}{command.summary[1:]}. {command.details}".strip()
        super().__init__(prog=prog, description=text, allow_abbrev=False)
        for argument in command.arguments:
            text = argument.help.replace("%", "%%")
            if argument.is_flag:
                self.add_argument(argument.name, action="store_true", help=text)
            elif argument.is_option:
                action = "append" if argument.repeatable else "store"
                self.add_argument(argument.name, metavar=argument.metavar, help=text, action=action)
            else:
                count = None if argument.required else "?"
                self.add_argument(argument.name, metavar=argument.metavar, nargs=count, help=text)

    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(f"{self.prog}: {message}; {' '.join(self.format_usage().split())}")

    def print_help(self, file: Any = None) -> NoReturn:  # noqa: ARG002, ANN401 - argparse's signature
        raise HelpRequested(self.format_help().rstrip())


def parse(line: str) -> argparse.Namespace:
    name, *words = _words("%gpu", line) or ["status"]
    if name in ("-h", "--help"):
        raise HelpRequested(overview())
    if name == MEASURE.name:  # this is the cell magic, used without a cell
        _parser(name).parse_args(words)
        raise ArgumentsError("%gpu measure needs a cell: write %%gpu measure as the first line of the cell to measure")
    if name == "note" and words and words[0] not in ("-h", "--help", "--clear"):
        words = ["--", " ".join(words)]  # the text needs no quotes
    found = _parser(name).parse_args(words)
    if name == "help" and found.command:
        _parser(found.command).print_help()
    found.name = name
    return found


def parse_burst(line: str) -> argparse.Namespace:
    words = _words("%%gpu", line)
    if words and words[0] in COMMANDS:
        raise ArgumentsError(
            f"%%gpu takes a share for one cell, such as %%gpu 1; for the command, write %gpu {words[0]}"
        )
    return _Parser("%%gpu", BURST).parse_args(words)


def parse_measure(line: str) -> argparse.Namespace:
    return _parser(MEASURE.name).parse_args(_words(MEASURE_NAME, line)[1:])


def size(prog: str, fraction: str | None, memory: str | None) -> tuple[int | None, int | None]:
    try:
        return (
            None if fraction is None else parse_fraction_milli(fraction),
            None if memory is None else parse_memory_mib(memory),
        )
    except ValueError as error:
        raise ArgumentsError(f"{prog}: {error}") from None


def duration_ms(prog: str, text: str, *, also: str = "") -> int:
    try:
        read_ms = parse_duration_ms(text)
    except ValueError:
        read_ms = 0
    if not read_ms:
        words = f", or {also}" if also else ""
        allowed = f"expected a duration such as 30s, 10m or 1h{words}"
        raise ArgumentsError(f"{prog}: {text[:50]!r} is not a duration greater than 0; {allowed}")
    return read_ms


def overview() -> str:
    rows = [(f"%gpu {_signature(command)}", command.summary) for command in COMMANDS.values()]
    width = max(len(words) for words, _ in rows)
    rows += [("%%gpu FRACTION", BURST.summary), (f"{MEASURE_NAME} [OPTIONS]", MEASURE.summary)]
    rows.append(("%%cpu", "run this cell without waiting for the GPU (it must not use it)"))
    lines = [f"{words:<{width}}  {summary}" for words, summary in rows]
    return "\n".join([*lines, "", "%gpu COMMAND --help describes a command."])


def _signature(command: Command) -> str:
    words = [command.name]
    for argument in command.arguments:
        text = f"{argument.name} {argument.metavar}".rstrip() if argument.is_option else argument.metavar
        words.append(text if argument.required else f"[{text}]")
    return " ".join(words)


def _words(prog: str, line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ArgumentsError(f"{prog}: {line[:100]!r} cannot be split into words: {error}") from None


def _parser(name: str) -> _Parser:
    if name == MEASURE.name:
        return _Parser(MEASURE_NAME, MEASURE)
    if name in COMMANDS:
        return _Parser(f"%gpu {name}", COMMANDS[name])
    import difflib  # noqa: PLC0415 - only needed for misspelt names

    close = difflib.get_close_matches(name, COMMANDS, 1)
    hint = f" Did you mean %gpu {close[0]}?" if close else ""
    raise ArgumentsError(f"%gpu {name[:50]} is unknown; choose one of: {', '.join(COMMANDS)}.{hint}")


# Completion asks the broker for fractions and pools at most once a minute, with a short timeout, because a completion must not block.

_LINE = re.compile(r"\s*(%%?)gpu\s(.*)", re.DOTALL)
_TIMEOUT_S = 0.3
_KEEP_S = 60.0


class Completer:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._host: HostStatus | None = None
        self._read_s = -_KEEP_S

    def complete(self, line: str) -> tuple[str, list[str]] | None:
        """Return the incomplete word at the end of `line`, and its completions. Return None for lines without our magics."""
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        *words, fragment = match[2].split(" ")
        words = [word for word in words if word]
        if match[1] == "%%" and words[:1] == [MEASURE.name]:
            proposed = self._proposals(MEASURE, words[1:], fragment)
        elif match[1] == "%%":
            proposed = self._proposals(BURST, words, fragment)
        elif words:
            proposed = self._proposals(COMMANDS.get(words[0], Command("", "")), words[1:], fragment)
        else:
            proposed = list(COMMANDS)
        return fragment, [text for text in proposed if text.startswith(fragment)]

    def _proposals(self, command: Command, words: list[str], fragment: str) -> list[str]:
        options = {argument.name: argument for argument in command.arguments if argument.is_option}
        if words and words[-1] in options and not options[words[-1]].is_flag:
            return self._values(options[words[-1]])
        names = [name for name, option in options.items() if option.repeatable or name not in words]
        if fragment.startswith("-"):
            return [*names, "--help"]
        given, value_follows = 0, False  # the number of words that are neither options nor values of options
        for word in words:
            given += not (value_follows or word.startswith("-"))
            value_follows = not value_follows and word in options and not options[word].is_flag
        places = [argument for argument in command.arguments if not argument.is_option]
        values = self._values(places[given]) if given < len(places) else []
        return [*values, *([MEASURE.name] if command is BURST and not words else []), *names]

    def _values(self, argument: Argument) -> list[str]:
        if argument.kind == "command":
            return [*COMMANDS, MEASURE.name]
        if argument.kind == "memory":  # parts of the device, whose size came with the last grant
            device = os.environ.get(DEVICE, "")
            device_mib = int(device) if device.isascii() and device.isdigit() else 81920
            return [format_memory(device_mib // part).replace(" ", "") for part in (8, 4, 2, 1)]
        if argument.kind not in ("fraction", "pool"):
            return list(argument.values)
        host = self._status()
        leases = host.leases if host is not None else []
        pool = next((lease.spec.pool for lease in leases if lease.lease_id == self._settings.lease_id), "")
        if argument.kind == "pool":
            return [pool] if pool else []
        milli = host.pools.get(pool, []) if host is not None else []
        return [format_fraction(each) for each in milli] or list(FRACTIONS)

    def _status(self) -> HostStatus | None:
        now_s = time.monotonic()
        if now_s - self._read_s >= _KEEP_S:
            self._read_s = now_s
            try:
                with self._settings.connect(_TIMEOUT_S) as client:
                    self._host = client.status()
            except FractionalGPUError:
                self._host = None
        return self._host
