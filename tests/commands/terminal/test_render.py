"""Status as text: its form. Its words are in golden/status.txt."""

import os

from fractional_gpu.commands.terminal.render import bar, lease_name, render_leases, render_status
from fractional_gpu.commands.terminal.text import plain
from fractional_gpu.protocol.status import Stranger
from tests.commands.pictures import a_device, a_host, a_lease


def test_a_bar_shows_strangers_use_reservations_and_what_is_free() -> None:
    device = a_device(memory_mib=1000, used_mib=350, stranger_mib=100, reserved_mib=500)
    assert bar(device, cells=10).plain == "x##==....."
    assert len(bar(device)) == 24


def test_a_lease_is_named_by_its_label_and_the_beginning_of_its_id() -> None:
    assert lease_name(a_lease(label="train.ipynb")) == "train.ipynb (3f2a9c1b)"
    assert lease_name(a_lease()) == "3f2a9c1b"


def test_leases_of_others_come_with_their_users() -> None:
    own, other = a_lease(label="a", owner="me", uid=os.geteuid()), a_lease(label="b", owner="bob", uid=54_321)
    for leases, users in (([own], []), ([other], ["bob"]), ([own, other], ["me", "bob"])):
        header, *rows = plain(render_leases(leases)).splitlines()
        assert [row.split()[-1] for row in rows if header.endswith("USER")] == users


def test_every_line_fits_the_terminal_and_nothing_of_it_is_lost() -> None:
    strangers = [Stranger(pid=pid, user="bob", used_mib=100) for pid in (1, 2, 3)]
    status = a_host(
        devices=[
            a_device(
                stranger_mib=300, strangers=strangers, why_not="the driver is too old to save them", over_committed=True
            )
        ],
        leases=[
            a_lease(label="train the large one, with all of last year's pictures", busy=True, pinned_ms=90_000),
            a_lease(
                lease_id="77aa00bb11cc", position=1, sentence="4 GiB is needed, 1 GiB is free on the roomiest device"
            ),
        ],
    )
    wide = plain(render_status(status))
    assert max(map(len, wide.splitlines())) > 100
    for width in (100, 80, 60):
        lines = plain(render_status(status, width)).splitlines()
        assert max(map(len, lines)) <= width, f"at {width}"
        assert sorted("".join("".join(lines).split())) == sorted("".join(wide.split()))
