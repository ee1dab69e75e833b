"""Groups of users, each in a pool of its own or in the default one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fractional_gpu.simulator.traces import Session


@dataclass(frozen=True, slots=True)
class Group:
    """A group, how large it is beside the others, and the pool of its sessions (empty: the default pool)."""

    name: str
    weight: int = 1
    pool: str = ""


def in_groups(trace: Sequence[Session], groups: Sequence[Group]) -> list[Session]:
    """Return the sessions with their users' groups and pools.

    The users, in the order of their names, are divided by the groups' weights: the first ones are in the first group, and so on.
    Classes, whose members have consecutive numbers, so stay together as far as groups allow.
    """
    users = sorted({session.user for session in trace})
    whole = sum(group.weight for group in groups)
    of_user: dict[str, Group] = {}
    begin = running = 0
    for group in groups:
        running += group.weight
        end = len(users) * running // whole
        of_user |= dict.fromkeys(users[begin:end], group)
        begin = end
    return [replace(one, group=of_user[one.user].name, pool=of_user[one.user].pool) for one in trace]
