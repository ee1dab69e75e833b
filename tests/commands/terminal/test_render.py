"""Status as text: its form. Its words are in golden/status.txt."""

import pytest

from fractional_gpu.commands.terminal.render import bar, describe_state, lease_name, render_leases, render_status
from fractional_gpu.commands.terminal.text import plain, table
from fractional_gpu.protocol.status import Stranger
from tests.commands.pictures import a_device, a_host, a_lease


def test_a_bar_shows_strangers_use_reservations_and_what_is_free() -> None:
    device = a_device(memory_mib=1000, used_mib=350, stranger_mib=100, reserved_mib=500)
    assert bar(device, cells=10).plain == "x##==....."
    assert len(bar(device)) == 24


def test_a_bar_hides_nothing_that_exists() -> None:
    assert bar(a_device(memory_mib=80_000, used_mib=3, stranger_mib=1, reserved_mib=10), cells=8).plain == "x#=....."


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
            a_lease(label="train the large one, with all of last year's pictures", busy=True, pinned_ms=90_000),
            a_lease(
                lease_id="77aa00bb11cc", position=1, sentence="4 GiB are needed, 1 GiB are free on the roomiest device"
            ),
        ],
    )
    wide = plain(render_status(status))
    assert max(map(len, wide.splitlines())) > 100
    for width in (100, 80, 60):
        lines = plain(render_status(status, width)).splitlines()
        assert max(map(len, lines)) <= width, f"at {width}"
        assert sorted("".join("".join(lines).split())) == sorted("".join(wide.split()))


def test_a_path_that_is_too_long_is_shortened_on_the_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    labels = ["/home/ada/vision/2026/experiments/train.ipynb", "/data/shared/courses/deep-learning/week-3/lesson.ipynb"]
    leases = [a_lease(label=label, position=place) for place, label in enumerate([*labels, "Python 3 · 1/4 GPU"], 1)]
    assert all(label in plain(render_leases(leases)) for label in labels)
    for width, names in (
        (200, labels),
        (100, ["~/.../2026/experiments/train.ipynb", ".../week-3/lesson.ipynb"]),
        (80, ["~/.../train.ipynb", ".../lesson.ipynb"]),
        (60, ["~/.../train.ipynb", ".../lesson.ipynb"]),
    ):
        shown = plain(render_leases(leases, width))
        assert max(map(len, shown.splitlines())) <= width
        for name in [*names, "Python 3 · 1/4 GPU"]:
            assert f"3f2a9c1b  {name}  " in shown, "in the table, in one piece"
            assert f". {name} (3f2a9c1b): waits for its turn" in shown


def test_a_table_without_a_width_has_one_line_a_row() -> None:
    assert plain(table(("A", "B"), [("a b c", "x" * 200)])) == f"  A      B\n  a b c  {'x' * 200}\n"
    narrow = plain(table(("A", "B"), [("a", "one two three four")], width=15))
    assert narrow == "  A  B\n  a  one two\n     three four\n"
