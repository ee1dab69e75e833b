"""The open questions about the driver, decided in about 90 seconds: python -P -m tests.gpu.questions --json questions.json

What the machine is; whom the doctor finds able to checkpoint; what the driver and NVML say of each kind of CUDA process; what can be
seen of managed memory from outside; what `cuInit` costs; how saved memory counts on the host. See tests/gpu/items.py for the rules.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tests.gpu.driver import Driver
from tests.gpu.items import Item, Note, NotHereError, Setting, cycle, main, tried
from tests.gpu.look import containing, device_files, grown, host_memory, kinds_of_mappings, mappings, sees
from tests.gpu.talk import SilentError, Talker
from tests.support.paths import PYTHONPATH, ROOT

__all__ = ["ITEMS"]

_OTHER_UID: Final = 65534  # the user without rights that every system has
_START_S: Final = 30.0
_ANSWER_S: Final = 20.0
_MAPPED_MIB: Final = 32
_ROOT: Final = ROOT
_FILES: Final = {
    "thp_enabled": "/sys/kernel/mm/transparent_hugepage/enabled",
    "thp_defrag": "/sys/kernel/mm/transparent_hugepage/defrag",
    "thp_shmem_enabled": "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "nr_hugepages": "/proc/sys/vm/nr_hugepages",
    "nr_overcommit_hugepages": "/proc/sys/vm/nr_overcommit_hugepages",
    "overcommit_memory": "/proc/sys/vm/overcommit_memory",
    "swappiness": "/proc/sys/vm/swappiness",
    "yama_ptrace_scope": "/proc/sys/kernel/yama/ptrace_scope",
    "driver": "/proc/driver/nvidia/version",
}


# ---- the machine -------------------------------------------------------------------------------------------------------------


def system(setting: Setting, note: Note) -> None:
    """Driver, persistence, huge pages, yama, memory, what is installed."""
    note(
        "kernel",
        f"{platform.release()} {platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}",
    )
    for name, path in _FILES.items():
        note(name, tried(partial(_words, path)))
    told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    note(
        "memory",
        {
            name: told[name].strip()
            for name in ("MemTotal", "MemAvailable", "SwapTotal", "Hugepagesize")
            if name in told
        },
    )
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    note("process", {name: status[name].strip() for name in ("Uid", "CapEff", "NSpid", "Seccomp") if name in status})
    note("cgroup", tried(lambda: Path("/proc/self/cgroup").read_text().split()))
    note("numa_nodes", sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*")))
    note("compiler", shutil.which("cc") or shutil.which("gcc") or "none")
    for package in ("cuda-bindings", "nvidia-ml-py", "torch", "msgspec", "ipykernel"):
        note(package, _version(package))
    if not setting.simulated:
        note("device", _device())


def _words(path: str) -> str:
    return " ".join(Path(path).read_text().split())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device() -> dict[str, object]:
    import pynvml as nvml  # noqa: PLC0415 - the simulated device needs none

    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(0)

        def asked(call: str, *given: object) -> object:
            try:
                answer = getattr(nvml, call)(*given)
            except (nvml.NVMLError, AttributeError) as error:
                return f"{type(error).__name__}: {error}"
            return answer.decode() if isinstance(answer, bytes) else answer

        found: dict[str, object] = {
            "count": asked("nvmlDeviceGetCount"),
            "driver": asked("nvmlSystemGetDriverVersion"),
            "cuda": asked("nvmlSystemGetCudaDriverVersion_v2"),
        }
        for name in (
            "Name",
            "PersistenceMode",
            "ComputeMode",
            "MigMode",
            "CurrPcieLinkGeneration",
            "CurrPcieLinkWidth",
        ):
            found[name] = asked(f"nvmlDeviceGet{name}", handle)
        bus = asked("nvmlDeviceGetPciInfo", handle)
        place = str(getattr(bus, "busId", "")).lower()[4:]
        found["numa_node"] = tried(lambda: Path(f"/sys/bus/pci/devices/{place}/numa_node").read_text().strip())
        return found
    finally:
        nvml.nvmlShutdown()


# ---- the doctor, and who may -------------------------------------------------------------------------------------------------


def doctor(setting: Setting, note: Note) -> None:
    """What `jupyter gpu doctor` finds as this user."""
    note("uid", os.geteuid())
    _doctor(setting, note, {}, None)


def doctor_as_another(setting: Setting, note: Note) -> None:
    """The same as a user without rights."""
    with _public_copy() as (environment, home):
        os.chown(home, _OTHER_UID, _OTHER_UID)
        note("uid", _OTHER_UID)
        homes = {"HOME": str(home), "TMPDIR": str(home), "XDG_RUNTIME_DIR": str(home)}
        _doctor(setting, note, {**environment, **homes}, _OTHER_UID)


def _doctor(setting: Setting, note: Note, environment: dict[str, str], uid: int | None) -> None:
    as_user: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    if setting.simulated:
        environment = {**environment, "JUPYTER_GPU_SIMULATE": "1x256MiB"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "doctor", "--json"],
        env={**os.environ, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
        **as_user,
    )
    note("status", done.returncode)
    if "No module named" in done.stderr:
        raise NotHereError(done.stderr.strip().splitlines()[-1])
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError):
        note("said", (done.stdout + done.stderr)[-600:])
        raise
    note("findings", [one for one in findings if one["severity"] not in ("ok", "note")] or "nothing wrong")
    note("checkpoint", [one for one in findings if one["check"] in ("checkpoint", "process-use")])


@contextmanager
def _public_copy() -> Iterator[tuple[dict[str, str], Path]]:
    """A copy of what another user needs of the checkout, which may be out of that user's reach; and an empty folder.

    Raises NotHereError where that user cannot run this Python at all.
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
        for part in ("provisioner", "kernelext", "tests/gpu", "tests/support"):
            shutil.copytree(_ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests" / "__init__.py").touch()  # before any other package of this name
        (folder / "home").mkdir()
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        ours = PYTHONPATH.split(os.pathsep)
        inherited = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one not in ours]
        yield (
            {
                "PYTHONPATH": os.pathsep.join(
                    [str(folder / "provisioner"), str(folder / "kernelext"), str(folder), *inherited]
                )
            },
            folder / "home",
        )


def same_user_without_root(setting: Setting, note: Note) -> None:
    """A user without rights saves a process of its own, root saves that user's, and that user tries root's."""
    before = os.environ.get("PYTHONPATH", "")
    with _public_copy() as (environment, _home):
        os.environ.update(environment)
        try:
            with setting.hold(uid=_OTHER_UID) as own:
                own.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
                with setting.caller(uid=_OTHER_UID) as caller:
                    note("own", cycle(caller, own.pid))
                    note("own intact", tried(lambda: own.ask(_ANSWER_S, do="check")["intact"]))
                    note("of root", _of_root(setting, caller))
                with setting.caller() as caller:
                    note("by root", cycle(caller, own.pid))
                    note("by root intact", tried(lambda: own.ask(_ANSWER_S, do="check")["intact"]))
        finally:
            os.environ["PYTHONPATH"] = before


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


def _described(setting: Setting, caller: Talker, pid: int) -> dict[str, Any]:
    """Return state, restore thread and NVML's entry of a process."""
    return {
        "state": caller.ask(_ANSWER_S, call="state", pid=pid),
        "thread": caller.ask(_ANSWER_S, call="thread", pid=pid),
        "nvml": sees(setting.backend, pid)["listed"][str(pid)],
    }


def cu_init(setting: Setting, note: Note) -> None:
    """How long opening the driver takes, twice, and what the calling process leaves on the device while it lives."""
    times: list[object] = []
    for _ in range(2):
        before = sees(setting.backend)["used_mib"]
        with Talker(("-m", "tests.gpu.caller", setting.backend)) as caller:
            times.append(caller.listen(_START_S, "opening")["opened_s"])
            during = sees(setting.backend, caller.pid)
    note("opened_s", times)
    note("caller_on_the_device", {"mib": round(during["used_mib"] - before, 1), "nvml": during["listed"]})


def plain(setting: Setting, note: Note) -> None:
    """A process with a context and memory: what is said of it, a whole cycle, and how its saved memory counts on the host."""
    empty_mib = sees(setting.backend)["used_mib"]
    with setting.hold() as holder, setting.caller() as caller:
        if not setting.simulated:
            note("start_s", holder.ask(_START_S, do="started")["seconds"])
        holder.ask(_START_S, do="hold", mib=setting.small_mib, cached_mib=0)
        note("process", _described(setting, caller, holder.pid))
        resident_mib = sees(setting.backend)["used_mib"]
        note("held_mib", setting.small_mib)
        note("device_mib", {"empty": empty_mib, "resident": resident_mib})
        memory_before, before = tried(lambda: host_memory(holder.pid)), tried(lambda: mappings(holder.pid))
        note("lock", caller.ask(_ANSWER_S, call="lock", pid=holder.pid))
        note("checkpoint", caller.ask(60, call="checkpoint", pid=holder.pid))
        saved = sees(setting.backend, holder.pid)
        note("saved", {**_described(setting, caller, holder.pid), "device_mib": saved["used_mib"]})
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


def only_cu_init(setting: Setting, note: Note) -> None:
    """A process that has called cuInit and has no context: can it be locked and saved, is it listed?"""
    with setting.hold("init") as holder, setting.caller() as caller:
        holder.ask(_START_S, do="started")
        note("process", _described(setting, caller, holder.pid))
        note("device_mib", sees(setting.backend)["used_mib"])
        note("cycle", cycle(caller, holder.pid))
        note("a context afterwards", tried(lambda: holder.ask(_START_S, do="context")))
        note("process with a context", _described(setting, caller, holder.pid))


def no_cuda(setting: Setting, note: Note) -> None:
    """What the driver says of a process without CUDA, of one that is gone, and of a thread's number."""
    with setting.caller() as caller:
        with Talker(("-c", "import sys; print('{}', flush=True); sys.stdin.read()")) as other:
            other.listen(_START_S, "starting")
            note("without CUDA", _described(setting, caller, other.pid))
            note("lock", caller.ask(_ANSWER_S, call="lock", pid=other.pid, timeout_ms=1000))
        note("gone", _described(setting, caller, other.pid))
        with setting.hold() as holder:
            holder.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
            threads = [int(path.name) for path in Path(f"/proc/{holder.pid}/task").iterdir()]
            others = [thread for thread in threads if thread != holder.pid]
            note("threads", len(threads))
            for thread in others[:1]:
                note("a thread's number", _described(setting, caller, thread))


def forked(setting: Setting, note: Note) -> None:
    """A child that inherited a context and makes no call: what is said of it, and whether its parent can be saved."""
    with setting.hold() as holder, setting.caller() as caller:
        holder.ask(_START_S, do="hold", mib=_MAPPED_MIB, cached_mib=0)
        child = holder.ask(_ANSWER_S, do="fork")["child"]
        note("child", _described(setting, caller, child))
        note("child has", tried(lambda: {"files": device_files(child), "maps": kinds_of_mappings(mappings(child))}))
        note("cycle of the parent alone", cycle(caller, holder.pid))
        note("parent intact", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))
        note("lock of the child", caller.ask(_ANSWER_S, call="lock", pid=child, timeout_ms=2000))
        note("unlock of the child", caller.ask(_ANSWER_S, call="unlock", pid=child))


def stopped(setting: Setting, note: Note) -> None:
    """A stopped process: is its state told, does a lock hang, what becomes of it when it goes on?"""
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
    """What /proc and NVML show of a process with one kind of memory: can the broker see managed memory by itself?"""
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


def what_the_bindings_know(_setting: Setting, note: Note) -> None:
    """Which calls that might be used one day these bindings and this driver have."""
    driver = Driver()
    note("cuInit", driver.answer("cuInit", 0)[:2])
    result, name, values = driver.answer("cuDriverGetVersion")
    note("driver serves CUDA", values[0] if result == 0 else name)
    for call in (
        "cuCheckpointProcessGetRestoreThreadId",
        "cuCheckpointOperationComplete",
        "cuMemCreate",
        "cuMemHostRegister",
    ):
        note(call, hasattr(driver.cuda, call))
    note("CUcheckpointGpuPair", hasattr(driver.cuda, "CUcheckpointGpuPair"))
    note("threads", threading.active_count())


ITEMS: Final = {
    "system": Item(act=system, longest_s=30),
    "bindings": Item(act=what_the_bindings_know, longest_s=30, needs=("driver",)),
    "cu-init": Item(act=cu_init, longest_s=60),
    "plain": Item(act=plain, longest_s=90),
    "calls-while-locked": Item(act=calls_while_locked, longest_s=90),
    "only-cu-init": Item(act=only_cu_init, longest_s=60, needs=("driver",)),
    "no-cuda": Item(act=no_cuda, longest_s=60),
    "forked": Item(act=forked, longest_s=90, needs=("driver",)),
    "kinds-of-memory": Item(act=kinds_of_memory, longest_s=120, needs=("driver",)),
    "same-user-without-root": Item(act=same_user_without_root, longest_s=90, needs=("driver", "root")),
    "doctor": Item(act=doctor, longest_s=90),
    "doctor-as-another": Item(act=doctor_as_another, longest_s=90, needs=("root",)),
    "stopped": Item(act=stopped, longest_s=90),
}


if __name__ == "__main__":
    raise SystemExit(main("tests.gpu.questions", ITEMS))
