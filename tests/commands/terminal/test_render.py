"""Status as text."""

import pytest

from fractional_gpu.commands.terminal.render import (
    bar,
    describe_state,
    lease_name,
    render_status,
    table,
)
from fractional_gpu.protocol.messages import Stranger
from tests.commands.pictures import a_device, a_host, a_lease


def test_a_bar_shows_strangers_use_reservations_and_what_is_free() -> None:
    device = a_device(memory_mib=1000, used_mib=350, stranger_mib=100, reserved_mib=500)
    assert bar(device, cells=10) == "x##==....."
    assert len(bar(device)) == 24


def test_a_bar_hides_nothing_that_exists() -> None:
    assert bar(a_device(memory_mib=80_000, used_mib=3, stranger_mib=1, reserved_mib=10), cells=8) == "x#=....."


@pytest.mark.parametrize(
    "differences",
    [
        {"memory_mib": 0, "used_mib": 0},
        {"memory_mib": 100, "used_mib": 500, "stranger_mib": 400, "reserved_mib": 900},
    ],
)
def test_a_bar_keeps_its_length_whatever_a_device_claims(differences: dict[str, int]) -> None:
    assert len(bar(a_device(**differences), cells=12)) == 12


def test_states_are_words() -> None:
    assert describe_state(a_lease(busy=True)) == "on the GPU, busy, 12 s"
    assert describe_state(a_lease(state="suspended", age_ms=180_000)) == "suspended, 3 min"
    assert describe_state(a_lease(state="levitating", age_ms=0)) == "levitating, 0 ms"


def test_a_lease_is_named_by_its_label_and_the_beginning_of_its_id() -> None:
    assert lease_name(a_lease(label="train.ipynb")) == "train.ipynb (3f2a9c1b)"
    assert lease_name(a_lease()) == "3f2a9c1b"


def test_the_whole_picture() -> None:
    status = a_host(
        simulated=True,
        host_saved_mib=4096,
        devices=[
            a_device(index=1, device_id="GPU-0002", pool="", lost=True, memory_mib=1024),
            a_device(
                name="Simulated GPU", used_mib=12_288, stranger_mib=6144, reserved_mib=12_288, over_committed=True
            ),
        ],
        leases=[
            a_lease(label="train.ipynb", busy=True, fraction_milli=500, reserve_mib=12_288, used_mib=6144),
            a_lease(
                lease_id="77aa00bb11cc",
                state="suspended",
                saved_mib=4096,
                used_mib=0,
                age_ms=90_000,
                position=1,
                sentence="waits until train.ipynb has finished its cell",
            ),
        ],
    )
    assert (
        render_status(status)
        == """\
GPUs (simulated: no real GPU is involved)
  0  Simulated GPU  pool default
     [xxxxxx######======......]  12 GiB reserved, 12 GiB used of 24 GiB
     other programs hold 6 GiB
     over-committed: more is held than fits; it admits no kernel until that changes
  1  NVIDIA L4  pool -
     [........................]  0 MiB reserved, 0 MiB used of 1 GiB
     lost: the device does not answer; it admits no kernel until it does
     #  used    =  reserved    x  other programs    .  free

Kernels
  LEASE     KERNEL       GPU  STATE                   MEMORY            SAVED
  3f2a9c1b  train.ipynb  1/2  on the GPU, busy, 12 s  6 GiB of 12 GiB   -
  77aa00bb  -            1/4  suspended, 1 min        0 MiB of 5.9 GiB  4 GiB
  waiting:
    1. 77aa00bb: waits until train.ipynb has finished its cell

Host memory: 4 GiB saved of 32 GiB for suspended kernels
Broker 0.1.0, process 100, /run/user/1000/broker.sock
"""
    )


def test_an_empty_machine_says_so() -> None:
    text = render_status(a_host())
    assert "none: this machine has no GPU that can be shared" in text
    assert "none holds or waits for a GPU" in text


def test_what_a_device_tells_of_itself_is_shown_and_who_uses_it_without_a_lease() -> None:
    strangers = [Stranger(pid=pid, user="bob", used_mib=100) for pid in (1, 2, 3, 4)]
    device = a_device(stranger_mib=400, strangers=strangers, busy_percent=43, temperature_c=51, power_mw=230_400)
    text = render_status(a_host(devices=[device]))
    assert "     43% busy, 51 °C, 230 W\n" in text
    assert "other programs hold 400 MiB: process 1 of bob, process 2 of bob, process 3 of bob and 1 more\n" in text


def test_why_kernels_stay_is_shown_for_a_device_and_for_a_kernel() -> None:
    status = a_host(devices=[a_device(why_not="the driver is too old")], leases=[a_lease(label="a.ipynb", stays="MPS")])
    text = render_status(status)
    assert "     kernels there stay on it: the driver is too old\n" in text
    assert "a.ipynb (3f2a9c1b) cannot be suspended: MPS\n" in text


def test_work_in_the_background_is_called_that() -> None:
    assert describe_state(a_lease(busy=True, working=True)) == "on the GPU, working in the background, 12 s"


def test_every_line_fits_the_terminal_and_nothing_of_it_is_lost() -> None:
    strangers = [Stranger(pid=pid, user="bob", used_mib=100) for pid in (1, 2, 3)]
    status = a_host(
        devices=[
            a_device(
                stranger_mib=300, strangers=strangers, why_not="the driver is too old to save them", over_committed=True
            )
        ],
        leases=[
            a_lease(label="projects/2026/vision/experiments/train-the-large-one.ipynb", busy=True, pinned_ms=90_000),
            a_lease(
                lease_id="77aa00bb11cc", position=1, sentence="4 GiB are needed, 1 GiB are free on the roomiest device"
            ),
        ],
    )
    wide = render_status(status)
    assert max(map(len, wide.splitlines())) > 100
    for width in (100, 80, 60):
        lines = render_status(status, width).splitlines()
        assert max(map(len, lines)) <= width, f"at {width}"
        assert sorted("".join("".join(lines).split())) == sorted("".join(wide.split()))


def test_a_table_without_a_width_has_one_line_a_row() -> None:
    assert table(("A", "B"), [("a b c", "x" * 200)]) == ["  A      B", f"  a b c  {'x' * 200}"]
    assert table(("A", "B"), [("a", "one two three four")], width=15) == ["  A  B", "  a  one two", "     three four"]
