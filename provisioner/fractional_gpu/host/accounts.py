"""Finds the account whose limits and budgets apply to a process. One person can run processes under many uids.

A subordinate uid, as used in rootless containers, belongs to the account of its owner in /etc/subuid. Other sources of subordinate uids,
such as sssd, are not read. A uid without a passwd entry is its own account, unless the administrator has set one account for all such uids.
Shares and rates also apply per account, but permission to see or control a lease depends on the real uid.
"""

import pwd
import re
import time
from collections.abc import Callable
from pathlib import Path

_RANGE = re.compile(r"^([^:#\n][^:\n]*):(\d{1,10}):(\d{1,10})$", re.ASCII | re.MULTILINE)
_FRESH_S = 60.0
_MOST = 10_000  # cached uids; a user may have 65,536


class Accounts:
    """A mapping of uids to accounts. `file` lists the subordinate uids. Not thread-safe, so use it only on the broker's event loop."""

    def __init__(
        self, file: Path = Path("/etc/subuid"), unknown: int | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.unknown = unknown  # the uid to charge for uids without a user, or None to charge each uid itself
        self._file, self._now, self._stale_s = file, now, 0.0
        self._ranges: list[tuple[str, int, int]] = []
        self._known: dict[int, int] = {}

    def uid_of(self, uid: int) -> int:
        if self._now() >= self._stale_s or len(self._known) >= _MOST:
            self._stale_s = self._now() + _FRESH_S
            try:
                text = self._file.read_text(errors="replace")
            except OSError:
                text = ""
            self._ranges = [(owner, int(first), int(count)) for owner, first, count in _RANGE.findall(text)]
            self._known.clear()
        if uid not in self._known:
            self._known[uid] = self._find(uid)
        return self._known[uid]

    def _find(self, uid: int) -> int:
        if _uid_in(pwd.getpwuid, uid) is not None:
            return uid
        for owner, first, count in self._ranges:
            if first <= uid < first + count:
                found = int(owner) if owner.isdecimal() else _uid_in(pwd.getpwnam, owner)
                if found is not None:
                    return found
        return uid if self.unknown is None else self.unknown


def _uid_in(lookup: Callable[..., pwd.struct_passwd], key: object) -> int | None:
    try:
        return lookup(key).pw_uid
    except (KeyError, ValueError):  # no entry, or the name has a NUL
        return None


ACCOUNTS = Accounts()
"""This machine's accounts."""
account_uid = ACCOUNTS.uid_of


def account_name(uid: int) -> str:
    return user_name(account_uid(uid))


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
