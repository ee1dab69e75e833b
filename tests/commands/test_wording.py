"""The output of `jupyter gpu`, as users read it: golden/help.txt and golden/status.txt."""

import argparse
from pathlib import Path

from fractional_gpu.commands.main import COMMANDS, _overview, subcommand
from fractional_gpu.commands.terminal.render import render_status
from fractional_gpu.commands.terminal.text import plain
from fractional_gpu.protocol.status import Stranger
from tests.commands.pictures import a_device, a_host, a_lease
from tests.support.golden import check_wording

GOLDEN = Path(__file__).with_name("golden")
WAITING = a_lease(
    lease_id="77aa00bb11cc",
    state="suspended",
    saved_mib=4096,
    used_mib=0,
    age_ms=90_000,
    position=1,
    sentence="waits until train.ipynb has finished its cell",
    expected_ms=30_000,
    expected_bounds_ms=(900, 61_000),
)
HOSTS = {
    "no GPU, no kernel": a_host(),
    "simulated, over-committed and lost devices; a busy kernel and one that waits": a_host(
        simulated=True,
        host_saved_mib=4096,
        devices=[
            a_device(index=1, device_id="GPU-0002", pool="", lost=True, memory_mib=1024),
            a_device(
                name="Simulated GPU",
                used_mib=12_288,
                stranger_mib=6144,
                reserved_mib=12_288,
                over_committed=True,
                busy_percent=50,
                power_mw=387_500,
                energy_mj=1_000_000,
            ),
        ],
        leases=[
            a_lease(label="train.ipynb", busy=True, fraction_milli=500, reserve_mib=12_288, used_mib=6144),
            WAITING,
        ],
    ),
    "other programs, sensors, and kernels that cannot leave": a_host(
        devices=[
            a_device(
                stranger_mib=400,
                strangers=[
                    Stranger(pid=4711, user="ada", used_mib=160, command="train\x1b[2J", own=True),
                    Stranger(pid=4712, user="eve", used_mib=120, command="python"),
                    *(Stranger(user="bob", used_mib=60) for _ in range(2)),
                ],
                busy_percent=43,
                temperature_c=51,
                power_mw=230_400,
                why_not="the driver is too old",
            )
        ],
        leases=[a_lease(label="a.ipynb", unsuspendable_reason="MPS", pinned_ms=600_000)],
    ),
    "a device and a host that go away": a_host(
        devices=[
            a_device(draining=True, goes_away_in_ms=30_000, leases_saved=1, leases_lost=1, reserved_mib=12_000),
            a_device(index=1, draining=True, goes_away_in_ms=0),
        ],
        leases=[
            a_lease(label="a.ipynb", goes_away_in_ms=30_000),
            a_lease(label="b.ipynb", goes_away_in_ms=30_000, lost_because="MPS"),
        ],
        goes_away_in_ms=0,
    ),
    "compute: needed, and more than there is": a_host(
        devices=[a_device(demand_milli=450), a_device(demand_milli=1340)], leases=[a_lease(label="a.ipynb", busy=True)]
    ),
    "each state": a_host(
        leases=[
            a_lease(lease_id=f"{number:08x}0000", state=state, busy=busy, working=working)
            for number, (state, busy, working) in enumerate(
                [
                    ("unattached", False, False),
                    ("unarmed", False, False),
                    ("resident", False, False),
                    ("resident", True, False),
                    ("resident", True, True),
                    ("suspending", False, False),
                    ("suspended", False, False),
                    ("resuming", False, False),
                    ("quarantined", False, False),
                ]
            )
        ]
    ),
}


def test_the_words_of_the_status_are_as_they_were_read() -> None:
    check_wording(GOLDEN / "status.txt", {heading: plain(render_status(host)) for heading, host in HOSTS.items()})


def described(parser: argparse.ArgumentParser) -> str:
    """Return a parser's explanations, in an order and form that no version of argparse changes."""
    lines = [parser.description or ""]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines += [f"  {name}\n{described(inner)}" for name, inner in action.choices.items()]
        elif not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
            names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            lines.append(f"  {names}: {(action.help or '') % {**vars(action), 'prog': parser.prog}}")
    return "\n".join([*lines, parser.epilog or ""])


def test_the_words_of_the_help_are_as_they_were_read() -> None:
    parsers = {"jupyter gpu": _overview(), **{name: subcommand(name)[1] for name in COMMANDS}}
    check_wording(GOLDEN / "help.txt", {name: described(parser) for name, parser in parsers.items()})
