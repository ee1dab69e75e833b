"""The open questions about the driver, without Jupyter: python -P -m tests.gpu.questions --json questions.json

What the machine is; what the driver and NVML report about each kind of CUDA process, whether it can be saved, and by which user; what
surrounds a target. Each is a plain process that tests/gpu/caller.py drives. docs/gpu-tests.md says what each item decides,
tests/gpu/items.py has the rules.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.gpu import frameworks, surroundings
from tests.gpu.driver import Driver
from tests.gpu.items import Item, Note, NotHereError, Setting, cycle, described, main, tried
from tests.gpu.look import containing, device_files, grown, host_memory, kinds_of_mappings, mappings, sees
from tests.gpu.talk import SilentError, Talker
from tests.support.paths import PYTHONPATH, ROOT

__all__ = ["ITEMS"]

_OTHER_UID: Final = 65534  # the user without rights that every system has
_START_S: Final = 30.0
_ANSWER_S: Final = 20.0
_MAPPED_MIB: Final = 32


# ---- the doctor, and who may -------------------------------------------------------------------------------------------------


def doctor(setting: Setting, note: Note) -> None:
    """What `jupyter gpu doctor` finds."""
    environment = {"JUPYTER_GPU_SIMULATE": "1x256MiB"} if setting.simulated else {}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "doctor", "--json"],
        env={**os.environ, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    if "No module named" in done.stderr:
        raise NotHereError(done.stderr.strip().splitlines()[-1])
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError):
        note("said", (done.stdout + done.stderr)[-600:])
        raise
    for one in findings:
        if one["severity"] not in ("ok", "note") or one["check"] in ("checkpoint", "process-use"):
            note(one["check"], f"{one['severity']}: {one['finding']}")


@contextmanager
def _public_copy() -> Iterator[str]:
    """A copy of what another user needs of the checkout, which may be out of that user's reach: the value of PYTHONPATH.

    Raises NotHereError if that user cannot run this Python at all.
    """
    python = (sys.executable, "-c", "import pynvml")
    try:
        done = subprocess.run(python, user=_OTHER_UID, capture_output=True, text=True, check=False, cwd="/")
    except PermissionError as error:
        raise NotHereError(f"user {_OTHER_UID} cannot run this Python: {error}") from error
    if done.returncode != 0:
        raise NotHereError(f"user {_OTHER_UID} cannot use this Python: {done.stderr.strip().splitlines()[-1]}")
    with tempfile.TemporaryDirectory(prefix="jgl-public-") as name:
        folder = Path(name)
        for part in ("tests/gpu", "tests/support"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests" / "__init__.py").touch()  # before any other package of this name
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        ours = PYTHONPATH.split(os.pathsep)
        inherited = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one not in ours]
        yield os.pathsep.join([str(folder), *inherited])


def same_user_without_root(setting: Setting, note: Note) -> None:
    """A user without rights saves their own process, root saves that user's, and that user tries root's."""
    with _public_copy() as path:
        os.environ["PYTHONPATH"] = path  # this process is the item's own
        with setting.hold(uid=_OTHER_UID) as own:
            own.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
            with setting.caller(uid=_OTHER_UID) as caller:
                note("own", cycle(caller, own.pid))
                note("own intact", tried(lambda: own.ask(_ANSWER_S, do="check")["intact"]))
                for name, answer in _of_root(setting, caller).items():
                    note(f"{name} of root's", answer)
            with setting.caller() as caller:
                note("by root", cycle(caller, own.pid))
                note("by root intact", tried(lambda: own.ask(_ANSWER_S, do="check")["intact"]))


def _of_root(setting: Setting, caller: Talker) -> dict[str, Any]:
    with setting.hold() as roots:
        roots.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
        return {
            "state": caller.ask(_ANSWER_S, call="state", pid=roots.pid),
            "thread": caller.ask(_ANSWER_S, call="thread", pid=roots.pid),
            "lock": caller.ask(_ANSWER_S, call="lock", pid=roots.pid),
            "unlock": caller.ask(_ANSWER_S, call="unlock", pid=roots.pid),
        }


# ---- kinds of processes ------------------------------------------------------------------------------------------------------


def cu_init(setting: Setting, note: Note) -> None:
    """How long opening the driver takes, twice, and what the calling process leaves on the device while it lives."""
    times: list[object] = []
    for _ in range(2):
        before = sees(setting.backend)["used_mib"]
        with Talker(("-m", "tests.gpu.caller", setting.backend)) as caller:
            times.append(caller.listen(_START_S, "opening")["opened_s"])
            during = sees(setting.backend, caller.pid)
    note("opened_s", times)
    note("caller on the device, MiB", round(during["used_mib"] - before, 1))
    note("caller in NVML's list", during["listed"])
    if not setting.simulated:
        driver = Driver()
        driver.do("cuInit", 0)
        note("serves CUDA", driver.do("cuDriverGetVersion"))
        note("bindings know custom storage", hasattr(driver.cuda, "cuCheckpointOperationComplete"))


def plain(setting: Setting, note: Note) -> None:
    """A process with a context and memory: its status, a whole cycle, and how its saved memory counts on the host."""
    empty_mib = sees(setting.backend)["used_mib"]
    with setting.hold() as holder, setting.caller() as caller:
        if not setting.simulated:
            note("start_s", holder.ask(_START_S, do="started")["seconds"])
        holder.ask(_START_S, do="hold", mib=setting.small_mib, cached_mib=0)
        note("process", described(setting, caller, holder.pid))
        resident_mib = sees(setting.backend)["used_mib"]
        note("held_mib", setting.small_mib)
        note("device_mib", {"empty": empty_mib, "resident": resident_mib})
        memory_before, before = tried(lambda: host_memory(holder.pid)), tried(lambda: mappings(holder.pid))
        note("lock", caller.ask(_ANSWER_S, call="lock", pid=holder.pid))
        note("checkpoint", caller.ask(60, call="checkpoint", pid=holder.pid))
        saved = sees(setting.backend, holder.pid)
        note("saved", {**described(setting, caller, holder.pid), "device_mib": saved["used_mib"]})
        note("host_before_mib", memory_before)
        note("host_saved_mib", tried(lambda: host_memory(holder.pid)))
        if isinstance(before, list):
            note("saved_lies_in", tried(lambda: grown(before, mappings(holder.pid))))
        note("restore", caller.ask(60, call="restore", pid=holder.pid))
        note("unlock", caller.ask(_ANSWER_S, call="unlock", pid=holder.pid))
        note("host_after_mib", tried(lambda: host_memory(holder.pid)))
        note("intact", holder.ask(_ANSWER_S, do="check")["intact"])


def calls_while_locked(setting: Setting, note: Note) -> None:
    """A CUDA call waits while its process is locked and saved; calls out of order are answered by an error."""
    with setting.hold() as holder, setting.caller() as caller:
        holder.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
        for name in ("checkpoint", "restore", "unlock"):
            note(f"{name} while running", caller.ask(_ANSWER_S, call=name, pid=holder.pid))
        note("lock", caller.ask(_ANSWER_S, call="lock", pid=holder.pid))
        holder.send(do="check")
        note("a call while locked", _waits(holder))
        note("lock while locked", caller.ask(_ANSWER_S, call="lock", pid=holder.pid))
        note("checkpoint with a thread in a call", caller.ask(60, call="checkpoint", pid=holder.pid))
        note("a call while saved", _waits(holder))
        note("restore", caller.ask(60, call="restore", pid=holder.pid))
        note("unlock", caller.ask(_ANSWER_S, call="unlock", pid=holder.pid))
        note("then", tried(lambda: holder.listen(_ANSWER_S, "check")))


def _waits(holder: Talker) -> str:
    try:
        return f"answered {holder.listen(1.0, 'check')}"
    except SilentError:
        return "waits"


def lock_timeout(setting: Setting, note: Note) -> None:
    """A lock with a limit shorter than the work on the device: when does it give up, and is the process unharmed?"""
    with setting.hold() as holder, setting.caller() as caller:
        holder.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
        work_ms = round(setting.hangs_s * 1000)
        holder.ask(_ANSWER_S, do="spin", ms=work_ms)
        note("work_ms", work_ms)
        note("lock", caller.ask(_ANSWER_S, call="lock", pid=holder.pid, timeout_ms=work_ms // 5))
        note("state after it", caller.ask(_ANSWER_S, call="state", pid=holder.pid))
        note("cycle", cycle(caller, holder.pid))
        note("intact", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))


def thread_made(setting: Setting, note: Note) -> None:
    """A context that another thread made: whose number does NVML list, and whose does the driver know?"""
    with setting.hold("init") as holder, setting.caller() as caller:
        thread = holder.ask(_START_S, do="thread")["thread"]
        holder.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
        note("by the process's number", described(setting, caller, holder.pid))
        note("by the thread's number", described(setting, caller, thread))
        note("cycle", cycle(caller, holder.pid))
        note("intact", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))


def without_context(setting: Setting, note: Note) -> None:
    """A process that has no context: after cuInit, and after it asked for the number of devices. Is it known, listed, locked?"""
    with setting.hold("init") as holder, setting.caller() as caller:
        holder.ask(_START_S, do="started")
        note("after cuInit", described(setting, caller, holder.pid))
        holder.ask(_START_S, do="count")
        note("after the count", described(setting, caller, holder.pid))
        note("device_mib", sees(setting.backend)["used_mib"])
        note("cycle", cycle(caller, holder.pid))
        note("a context afterwards", tried(lambda: holder.ask(_START_S, do="context")))
        note("with a context", described(setting, caller, holder.pid))


def no_cuda(setting: Setting, note: Note) -> None:
    """What the driver answers about a process without CUDA, and about one that is gone."""
    with setting.caller() as caller:
        with Talker(("-c", "import sys; print('{}', flush=True); sys.stdin.read()")) as other:
            other.listen(_START_S, "starting")
            note("without CUDA", described(setting, caller, other.pid))
            note("lock", caller.ask(_ANSWER_S, call="lock", pid=other.pid, timeout_ms=1000))
        note("gone", described(setting, caller, other.pid))


def forked(setting: Setting, note: Note, *, job_file: bool) -> None:
    """A child that inherited a context and makes no call: is it known, and can its parent be saved, alone and with the child?"""
    with setting.hold(job_file=job_file) as holder, setting.caller() as caller:
        holder.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
        child = holder.ask(_ANSWER_S, do="fork")["child"]
        note("child", described(setting, caller, child))
        note("child's files", tried(lambda: device_files(child)))
        note("parent alone", cycle(caller, holder.pid, **holder.given))
        note("parent intact", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))
        for phase, pids in (
            ("lock", (holder.pid, child)),
            ("checkpoint", (holder.pid, child)),
            ("restore", (child, holder.pid)),
        ):
            for pid in pids:
                name = f"{phase}, {'child' if pid == child else 'parent'}"
                note(name, caller.ask(_ANSWER_S, call=phase, pid=pid, timeout_ms=2000, **holder.given))
        for pid in (child, holder.pid):
            caller.ask(_ANSWER_S, call="unlock", pid=pid, **holder.given)
        note("intact after both", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))


def stopped(setting: Setting, note: Note) -> None:
    """A stopped process: is its state reported, does a lock hang, and what happens when it continues?"""
    with setting.hold() as holder:
        holder.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
        holder.signal(signal.SIGSTOP)
        for call in ("state", "thread"):
            with setting.caller() as caller:  # one that hangs cannot be asked the next
                note(f"{call} while stopped", tried(partial(caller.ask, setting.hangs_s, call=call, pid=holder.pid)))
        with setting.caller() as caller:
            try:
                within_s = setting.hangs_s + 1
                note("lock while stopped", caller.ask(within_s, call="lock", pid=holder.pid, timeout_ms=1000))
                late = False
            except SilentError:
                note("lock while stopped", f"no answer within {within_s:g} s of a lock with a limit of 1 s")
                late = True
            begun = time.perf_counter()
            holder.signal(signal.SIGCONT)
            if late:
                note("the lock after it goes on", tried(lambda: caller.listen(10, "lock")))
            note("state after it goes on", tried(lambda: caller.ask(10, call="state", pid=holder.pid)))
            note("unlock", tried(lambda: caller.ask(10, call="unlock", pid=holder.pid)))
            note("seconds until then", round(time.perf_counter() - begun, 3))
        note("intact", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))


# ---- what can be seen from outside -------------------------------------------------------------------------------------------


def kinds_of_memory(setting: Setting, note: Note) -> None:
    """What /proc and NVML show of a process with one kind of memory: can the broker see managed memory without help?"""
    ordinary: dict[str, Any] = {}
    for kind in ("plain", "managed", "pinned", "registered", "mapped", "export"):
        shown = tried(partial(_shown, setting, kind))
        note(kind, shown)
        if isinstance(shown, dict):
            ordinary = ordinary or shown
            note(f"{kind}, beside plain", _differences(ordinary, shown))
    note("import", tried(lambda: _imported(setting)))


def _shown(setting: Setting, kind: str) -> dict[str, Any]:
    with setting.hold() as holder:
        if kind == "plain":
            holder.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
            return _what_is_shown(setting, holder, holder.ask(_START_S, do="where")["address"])
        return _what_is_shown(setting, holder, holder.ask(_START_S, do=kind, mib=_MAPPED_MIB)["address"])


def _imported(setting: Setting) -> dict[str, Any]:
    """Memory of one process opened in another."""
    with setting.hold() as owner, setting.hold() as other:
        handle = owner.ask(_START_S, do="export", mib=_MAPPED_MIB)["handle"]
        return _what_is_shown(setting, other, other.ask(_START_S, do="import", handle=handle)["address"])


def _what_is_shown(setting: Setting, holder: Talker, address: int) -> dict[str, Any]:
    found = mappings(holder.pid)
    return {
        "nvml": sees(setting.backend, holder.pid)["listed"][str(holder.pid)],
        "files": device_files(holder.pid),
        "maps": kinds_of_mappings(found),
        "its address lies in": containing(found, address),
    }


def _differences(ordinary: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """Return how many files and mappings more, or less, a process has than the ordinary one, by name."""
    more: dict[str, dict[str, int]] = {}
    for part in ("files", "maps"):
        counts = [
            {name: value["mappings"] if part == "maps" else value for name, value in one[part].items()}
            for one in (ordinary, shown)
        ]
        by = {name: counts[1].get(name, 0) - counts[0].get(name, 0) for name in sorted({*counts[0], *counts[1]})}
        more[part] = {name: count for name, count in by.items() if count}
    return more


ITEMS: Final = {
    **surroundings.FIRST,
    "cu-init": Item(act=cu_init),
    "plain": Item(act=plain),
    "thread-made": Item(act=thread_made, needs=("driver",)),
    "without-context": Item(act=without_context, needs=("driver",)),
    "no-cuda": Item(act=no_cuda),
    "lock-timeout": Item(act=lock_timeout, needs=("driver",)),
    "forked": Item(act=partial(forked, job_file=False), needs=("driver",)),
    "forked-job-file": Item(act=partial(forked, job_file=True), needs=("driver",)),
    **frameworks.ITEMS,
    "calls-while-locked": Item(act=calls_while_locked),
    "doctor": Item(act=doctor, longest_s=90),
    "same-user-without-root": Item(act=same_user_without_root, needs=("driver", "root")),
    "kinds-of-memory": Item(act=kinds_of_memory, longest_s=90, needs=("driver",)),
    "stopped": Item(act=stopped),
    **surroundings.LAST,
}


if __name__ == "__main__":
    raise SystemExit(main("tests.gpu.questions", ITEMS))
