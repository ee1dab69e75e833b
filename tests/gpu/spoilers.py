"""What may leave a process, or the driver, unsound, and therefore comes last: python -P -m tests.gpu.spoilers --json spoilers.json

A profiler; a caller killed in the middle of a checkpoint and of a restore; a restore without room; memory of CUDA IPC; managed memory,
small on purpose. See tests/gpu/items.py for the rules.
"""

import time
from functools import partial
from typing import Any, Final

from tests.gpu.items import Item, Note, Setting, cycle, main, tried
from tests.gpu.look import sees
from tests.gpu.talk import SilentError, Talker, TalkError, gone

__all__ = ["ITEMS"]

_START_S: Final = 30.0
_ANSWER_S: Final = 60.0
_LONG_S: Final = 60.0
_STATE_S: Final = 15.0
_SETTLE_S: Final = 20.0
_POLL_S: Final = 0.1
_SMALL_MIB: Final = 64
_KILLED_AT: Final = (0.2, 0.6)  # of the time that the call takes undisturbed
# By number, and in the simulated device's words.
_LOCKED, _CHECKPOINTED = (1, "locked"), (2, "checkpointed")
_MOVING: Final = (4, 5, "checkpointing", "restoring")


def profiled(setting: Setting, note: Note) -> None:
    """A process under torch's profiler, and the same process after the profile has ended."""
    with setting.hold("torch") as holder, setting.caller() as caller:
        holder.ask(_ANSWER_S, do="hold", mib=_SMALL_MIB, cached_mib=0)
        holder.ask(_ANSWER_S, do="profile", on=True)
        note("while profiling", tried(lambda: cycle(caller, holder.pid)))
        note("intact", tried(lambda: holder.ask(_ANSWER_S, do="check")))
        note("profile", tried(lambda: holder.ask(_ANSWER_S, do="profile", on=False)))
        note("after profiling", tried(lambda: cycle(caller, holder.pid)))
        note("intact afterwards", tried(lambda: holder.ask(_ANSWER_S, do="check")))


# ---- a caller that dies ------------------------------------------------------------------------------------------------------


def killed_in_checkpoint(setting: Setting, note: Note) -> None:
    """The calling process is killed while the target's state is being saved."""
    _killed(setting, note, "checkpoint")


def killed_in_restore(setting: Setting, note: Note) -> None:
    """The calling process is killed while the target's state is being brought back."""
    _killed(setting, note, "restore")


def _killed(setting: Setting, note: Note, phase: str) -> None:
    with setting.hold() as neighbour:
        neighbour.ask(_START_S, do="hold", mib=16, cached_mib=0)
        with setting.hold() as holder, setting.caller() as caller:
            holder.ask(_LONG_S, do="hold", mib=setting.large_mib // 2, cached_mib=0)
            whole_s = cycle(caller, holder.pid, within_s=_LONG_S)[phase]["seconds"]
            note("undisturbed_s", whole_s)
        for part in _KILLED_AT:
            found: dict[str, Any] = {}
            note(f"killed at {part}", found)
            try:
                _kill_at(setting, phase, part * whole_s, found)
            except TalkError as error:
                found["ended by"] = str(error)
            note(f"killed at {part}", found)
        note("neighbour intact", tried(lambda: neighbour.ask(_ANSWER_S, do="check")["intact"]))


def _kill_at(setting: Setting, phase: str, after_s: float, found: dict[str, Any]) -> None:
    """Kill the caller this many seconds into the call, and note the driver's answer and what can be saved."""
    with setting.hold() as holder:
        holder.ask(_LONG_S, do="hold", mib=setting.large_mib // 2, cached_mib=0)
        with setting.caller() as caller:
            before = ("lock", "checkpoint") if phase == "restore" else ("lock",)
            for call in before:
                found[call] = caller.ask(_LONG_S, call=call, pid=holder.pid)["result"]
            caller.send(call=phase, pid=holder.pid)
            try:
                found["answered before the kill"] = caller.listen(after_s, phase)
            except SilentError:
                caller.process.kill()
                found["caller gone"] = gone(caller.pid, _SETTLE_S)
        with setting.caller() as second:
            found["states"] = []
            state = _states(setting, second, holder, found["states"])
            found["device_mib"] = sees(setting.backend, holder.pid)
            found["recovery"] = {}
            _recover(second, holder, state, found["recovery"])
        found["intact"] = tried(lambda: holder.ask(_STATE_S, do="check")["intact"])
        pid = holder.pid
    found["process gone after SIGKILL"] = gone(pid, _SETTLE_S)


def _states(setting: Setting, caller: Talker, holder: Talker, seen: list[dict[str, Any]]) -> object:
    """Note the states that the target goes through until one stays, and return that. A state that cannot be read is one, too."""
    begun = time.monotonic()
    last: object = None
    while time.monotonic() - begun < _SETTLE_S:
        answer = caller.ask(_STATE_S, call="state", pid=holder.pid)
        last = answer["value"] if answer["result"] == 0 else answer["name"]
        if not seen or seen[-1]["state"] != last:
            seen.append({"after_s": round(time.monotonic() - begun, 2), "state": last})
        if last not in _MOVING and time.monotonic() - begun > setting.steady_s:
            break
        time.sleep(_POLL_S)
    return last


def _recover(caller: Talker, holder: Talker, state: object, found: dict[str, Any]) -> None:
    """Bring the target back from what it is in, as the broker would."""
    calls: tuple[str, ...] = ()
    if state in _LOCKED:
        calls = ("unlock",)
    elif state in _CHECKPOINTED:
        calls = ("restore", "unlock")
    for call in calls:
        found[call] = caller.ask(_LONG_S, call=call, pid=holder.pid)
        if found[call]["result"] != 0:
            break
    found["state"] = caller.ask(_STATE_S, call="state", pid=holder.pid)


# ---- what the driver refuses -------------------------------------------------------------------------------------------------


def restore_without_room(setting: Setting, note: Note) -> None:
    """A restore that runs out of device memory: the errors then, when there is room again, and what stays on the device."""
    with setting.hold() as filler, setting.hold() as target, setting.caller() as caller:
        filler.ask(_START_S, do="hold", mib=1, cached_mib=0)
        target.ask(_START_S, do="hold", mib=setting.small_mib, cached_mib=0)
        for call in ("lock", "checkpoint"):
            note(call, caller.ask(_ANSWER_S, call=call, pid=target.pid))
        saved_mib = sees(setting.backend)["used_mib"]
        filler.ask(_ANSWER_S, do="fill_up", leave_mib=setting.small_mib / 2)
        note("restore without room", caller.ask(_ANSWER_S, call="restore", pid=target.pid))
        note("state", caller.ask(_ANSWER_S, call="state", pid=target.pid))
        note("again without room", caller.ask(_ANSWER_S, call="restore", pid=target.pid))
        filler.ask(_ANSWER_S, do="release")
        note("with room", caller.ask(_ANSWER_S, call="restore", pid=target.pid))
        note("unlock", caller.ask(_ANSWER_S, call="unlock", pid=target.pid))
        note("state afterwards", caller.ask(_ANSWER_S, call="state", pid=target.pid))
        note("a call of the process", tried(lambda: target.ask(10, do="check")))
        target.close()
        note("process gone after SIGKILL", gone(target.pid, _SETTLE_S))
        note("device_mib", {"saved": saved_mib, "after": sees(setting.backend)["used_mib"]})


def shared_memory(setting: Setting, note: Note) -> None:
    """A process that exported memory by CUDA IPC, and one that opened it: each is saved in turn."""
    with setting.hold() as owner, setting.hold() as other, setting.caller() as caller:
        for one in (owner, other):
            one.ask(_START_S, do="hold", mib=_SMALL_MIB, cached_mib=0)
        handle = owner.ask(_ANSWER_S, do="export", mib=_SMALL_MIB)["handle"]
        note("owner, not yet opened", tried(lambda: cycle(caller, owner.pid)))
        note("opening", tried(lambda: other.ask(_ANSWER_S, do="import", handle=handle)))
        for name, one in (("owner", owner), ("other", other)):
            note(name, tried(partial(cycle, caller, one.pid)))
            note(f"{name} intact", tried(partial(one.ask, _ANSWER_S, do="check")))


def managed_memory(setting: Setting, note: Note) -> None:
    """A process with managed memory as paged optimizers allocate it: what is refused, and what happens to the process."""
    with setting.hold() as neighbour, setting.hold() as holder, setting.caller() as caller:
        neighbour.ask(_START_S, do="hold", mib=_SMALL_MIB, cached_mib=0)
        holder.ask(_START_S, do="hold", mib=_SMALL_MIB, cached_mib=0)
        holder.ask(_ANSWER_S, do="managed", mib=_SMALL_MIB)
        note("nvml", sees(setting.backend, holder.pid)["listed"])
        note("cycle", tried(lambda: cycle(caller, holder.pid)))
        note("plain memory intact", tried(lambda: holder.ask(_ANSWER_S, do="check")))
        note("state", caller.ask(_ANSWER_S, call="state", pid=holder.pid))
        note("neighbour intact", tried(lambda: neighbour.ask(_ANSWER_S, do="check")))
        note("neighbour", tried(lambda: cycle(caller, neighbour.pid)))


ITEMS: Final = {
    "restore-without-room": Item(act=restore_without_room),
    "killed-in-restore": Item(act=killed_in_restore, longest_s=90),
    "killed-in-checkpoint": Item(act=killed_in_checkpoint, longest_s=90),
    "shared-memory": Item(act=shared_memory, needs=("driver",)),
    "managed-memory": Item(act=managed_memory, needs=("driver",)),
    "profiler": Item(act=profiled, longest_s=90, needs=("driver", "torch")),
}


if __name__ == "__main__":
    raise SystemExit(main("tests.gpu.spoilers", ITEMS))
