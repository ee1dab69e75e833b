"""A subordinate uid counts as the user that /etc/subuid gives it to; every other uid as itself, or as one account that is set for all."""

import pwd
from pathlib import Path

import pytest

from fractional_gpu.host.accounts import Accounts

pytestmark = pytest.mark.promise("one-user")

NOBODY = pwd.getpwnam("nobody").pw_uid
DAEMON = pwd.getpwnam("daemon").pw_uid
NAMELESS = 300_000  # and the following ones: no user of the machine has them


class Clock:
    """Monotonic time, set by a test, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def subuid(tmp_path: Path) -> Path:
    return tmp_path / "subuid"


@pytest.fixture
def found(subuid: Path, clock: Clock) -> Accounts:
    return Accounts(subuid, now=clock)


@pytest.mark.parametrize("owner", ["nobody", str(NOBODY)])
def test_a_subordinate_uid_counts_as_its_owner_who_is_given_by_name_or_uid(
    subuid: Path, found: Accounts, owner: str
) -> None:
    subuid.write_text(f"daemon:400000:65536\n{owner}:{NAMELESS}:10\n{owner}:500000:1\n")
    assert [found.uid_of(NAMELESS + more) for more in (-1, 0, 9, 10)] == [NAMELESS - 1, NOBODY, NOBODY, NAMELESS + 10]
    assert [found.uid_of(uid) for uid in (400_000, 465_535, 465_536, 500_000)] == [DAEMON, DAEMON, 465_536, NOBODY]


def test_a_user_with_a_name_counts_as_itself_even_within_anothers_range(subuid: Path, found: Accounts) -> None:
    subuid.write_text("nobody:0:100\n")  # uids of a directory service overlap with ranges on many machines
    assert [found.uid_of(uid) for uid in (0, DAEMON)] == [0, DAEMON]


def test_without_the_file_every_uid_counts_as_itself(found: Accounts) -> None:
    assert [found.uid_of(uid) for uid in (0, NOBODY, NAMELESS)] == [0, NOBODY, NAMELESS]


def test_uids_without_a_name_or_an_owner_count_as_the_account_that_is_set_for_them(subuid: Path) -> None:
    subuid.write_text(f"nobody:{NAMELESS}:10\n")
    found = Accounts(subuid, unknown=DAEMON)
    assert [found.uid_of(uid) for uid in (0, NAMELESS, NAMELESS + 10, 400_000)] == [0, NOBODY, DAEMON, DAEMON]


def test_a_changed_file_counts_within_a_minute(subuid: Path, found: Accounts, clock: Clock) -> None:
    assert found.uid_of(NAMELESS) == NAMELESS
    subuid.write_text(f"nobody:{NAMELESS}:10\n")
    clock.now_s += 61
    assert found.uid_of(NAMELESS) == NOBODY
