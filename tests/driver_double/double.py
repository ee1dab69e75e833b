"""Doubles of `libcuda.so.1` and `libnvidia-ml.so.1`, loaded by NVIDIA's own Python packages instead of the driver's libraries.

    double = DriverDouble(folder)
    subprocess.run([sys.executable, ...], env={**os.environ, **double.environment()})

A `DriverDouble` is one simulated host. Programs that run in its environment share its devices. What it plays is set with `set`, `fail`
and `hang`, also while they run; what they called is in `calls()`. docs/gpu-tests.md says what it plays and what it does not know.
"""

import hashlib
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from fractional_gpu.host.control_groups import mounts
from fractional_gpu.host.process import identify
from tests.driver_double.releases import newest, python_path

__all__ = ["Call", "Device", "DoubleProcess", "DriverDouble", "build"]

_HERE: Final = Path(__file__).parent
_LIBRARIES: Final = {
    "libcuda.so.1": ("cuda.c", "memory.c", "streams.c", "checkpoint.c", "symbols.c", "host.c"),
    "libnvidia-ml.so.1": ("nvml.c", "host.c"),
}
_HEADERS: Final = {"cuda.h": "nvidia-cuda-runtime", "nvml.h": "nvidia-nvml-dev"}
_FLAGS: Final = (
    "-std=gnu17",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-format-truncation",
    "-Werror",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)

# The driver's version, and the CUDA version that it serves.
_RELEASES: Final = {
    "570": ("570.172.08", 12080),
    "580": ("580.65.06", 13000),
    "610": ("610.43.02", 13030),
    "615": ("615.20.01", 13040),
}

# What `set` takes in addition to `devices`, `driver` and `latency`, and the defaults.
DEFAULTS: Final[Mapping[str, object]] = {
    "context_mib": 512,  # device memory that a context takes
    "reserved_mib": 500,  # device memory that the driver keeps for itself
    "save_gb_s": 0.0,  # speed of a checkpoint and of a restore; 0: as fast as it goes
    "load_gb_s": 0.0,
    "init_only_known": True,  # whether a process that only called cuInit has a checkpoint state
    "init_only_lock": 0,  # what locking it gives
    "no_cuda": 3,  # what asking for the state of a process without CUDA gives
    "init_only_listed": "unlisted",  # how NVML lists it: unlisted, zero
    "nvml_hides": (),  # pids that NVML does not list
    "nvml_tells_zero": (),  # pids that it lists with no memory
    "nvml_tells_memory": True,  # False: NVML tells no process's memory, as in some containers
    "nvml_thread_ids": False,  # whether it names each by a thread (drivers before 575.57)
    "mps_daemon": False,  # a control daemon serves the default folder: who names no other one is a client
    "mps": (),  # pids that are clients of MPS
    "graphics": (),  # pids that draw, too
    "graphics_only": (),  # pids that draw and do not compute (also in `graphics`)
    "forked_known": False,  # whether a forked child that inherited a context is known to the driver
    "forked_checkpoint": 0,  # what its checkpoint gives
    "forked_restore": 0,  # what its restore gives
    "stopped": "hang",  # what happens to who locks, checkpoints ... a stopped process: hang, or a number as the result
    "stopped_state": "0",  # the same for a call for its state (0: it is reported)
    "caller_death": "back",  # what becomes of a target whose caller dies in a checkpoint or restore: back, failed, done
    "managed_works": False,  # whether managed memory can be checkpointed
    "ipc_works": False,  # whether memory shared with other processes can be (driver 610 on: True)
    "refusal_spoils": False,  # whether a process is FAILED after a checkpoint that was refused
    "not_permitted": False,  # every checkpoint call gives 800
    "persistence": False,  # a restore needs no cuInit of the caller
    "tells_moving": True,  # whether the states CHECKPOINTING and RESTORING are told (driver 570: False)
    "busy": (),  # pids whose work on the device does not end
    "children_break_restore": False,  # whether a process with forked children fails in its restore, unless they are in a job
    "jobs_known": False,  # whether a checkpoint job helps (driver 590.44 on: True)
    "limits_known": False,  # whether control groups can have memory limits (driver 615 on: True)
    "limits_told": True,  # whether a process sees the limit of its own control group as the device's size
    "limits_hold_in_restore": True,  # whether a restore past the limit fails
}
_OF_DEVICES: Final = frozenset(
    {
        "extra_mib",  # memory used by what is no process of this host
        "samples",  # process utilisation, tuples (pid, stamp in microseconds or 0 for now, percent, percent of memory)
        "fails",  # NVML's error number for every call of this device
        "busy_percent",
        "temperature_c",
        "power_mw",
        "energy_mj",
        "compute_mode",
        "persistence_mode",
    }
)
_RECORD: Final = struct.Struct("<IIQIIIIQQII16I16QiIQII")  # Record of double.h up to `answered`
_STATE_AT: Final = 24
_MAGIC: Final = 0x44445631
_STATES: Final = ("running", "locked", "checkpointed", "failed", "checkpointing", "restoring")
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device. `mib` is what processes can have; `instances` are the MiB of its MIG instances, None without MIG mode."""

    mib: int = 1024
    name: str = "NVIDIA H100 80GB HBM3"
    chip: str = "GH100"
    instances: tuple[int, ...] | None = None
    device_id: str = field(default_factory=lambda: f"GPU-{uuid.uuid4()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one process. Structures in `arguments` are all their bytes in hexadecimal digits, NULL where none was given."""

    began_us: int  # on the monotonic clock
    elapsed_us: int
    pid: int
    name: str
    result: int | None  # None: it hangs at the wish of a test (a second entry follows when it ends)
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleProcess:
    """A CUDA process of the host. MiB with contexts, by device; nothing while it is checkpointed."""

    pid: int
    state: str
    mib: Mapping[str, int]
    saved_mib: int
    at_work: bool  # a call is at work on the device
    lock_waits: bool  # a lock waits for that
    in_operation: bool  # it is being locked, saved, restored or unlocked


def build() -> Path:
    """Compile both libraries and return their folder. Once for each content of sources and headers. Raises RuntimeError."""
    include = _include()
    content = hashlib.sha256()
    for path in sorted((*_HERE.glob("*.[ch]"), *(include / name for name in _HEADERS))):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    ready = Path(sys.prefix) / "driver-double" / content.hexdigest()[:16]
    if ready.exists():
        return ready
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError(
            "the double of NVIDIA's driver needs a C compiler (cc): `tests/run setup` installs gcc, or says why it cannot"
        )
    ready.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ready.parent) as scratch:
        folder = Path(scratch) / "built"
        folder.mkdir()
        (folder / "errors.inc").write_text(_error_names(include / "cuda.h"), encoding="ascii")
        for library, sources in _LIBRARIES.items():
            command = [
                compiler,
                *_FLAGS,
                "-pthread",
                f"-I{include}",
                f"-I{folder}",
                f"-Wl,-soname,{library}",
                "-o",
                str(folder / library),
            ]
            done = subprocess.run(
                [*command, *(str(_HERE / one) for one in sources)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"the double of NVIDIA's driver does not compile:\n{done.stderr}")
        try:
            folder.rename(ready)
        except OSError:  # another test process was quicker
            if not ready.exists():
                raise
    return ready


def _include() -> Path:
    for header, package in _HEADERS.items():
        try:
            found = Path(str(metadata.distribution(package).locate_file("nvidia/cu13/include")))
        except metadata.PackageNotFoundError:
            found = Path("/nowhere")
        if not (found / header).exists():
            raise RuntimeError(
                f"the double of NVIDIA's driver needs {header} of the package {package}: run `tests/run setup`"
            )
    return found


def _error_names(header: Path) -> str:
    text = header.read_text(encoding="utf-8")
    members = text[text.index("typedef enum cudaError_enum") : text.index("} CUresult;")]
    return "".join(f"ERROR({name})\n" for name in re.findall(r"^\s+(CUDA_\w+)\s*=", members, re.MULTILINE))


class DriverDouble:
    """One simulated host in a new folder, by default with two devices of 1 GiB and driver 580."""

    def __init__(self, folder: Path, devices: Sequence[Device] = (Device(), Device()), *, driver: str = "580") -> None:
        self.folder = folder
        self.devices: tuple[Device, ...] = ()
        self._settings: dict[str, str] = {}
        self._numbers = itertools.count()
        for part in ("processes", "faults", "limits"):
            (folder / part).mkdir(parents=True)
            (folder / part).chmod(0o777)  # also for processes of other users
        (folder / "calls").touch()
        (folder / "capacity").touch()
        for shared in ("calls", "capacity"):
            (folder / shared).chmod(0o666)
        self._settings["cgroup2"] = str(next((mount.point for mount in mounts() if mount.version == 2), ""))
        self.set(devices=devices, driver=driver)

    def environment(self, bindings: str = "newest") -> dict[str, str]:
        """Return what makes a program's driver this host: the libraries, and that release of NVIDIA's Python packages."""
        release = newest() if bindings == "newest" else bindings
        paths = (python_path("cuda-bindings", release), os.environ.get("PYTHONPATH", ""))
        libraries = (str(build()), os.environ.get("LD_LIBRARY_PATH", ""))
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(path for path in libraries if path),
            "DRIVER_DOUBLE": str(self.folder),
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        }

    def set(
        self,
        *,
        devices: Sequence[Device] | None = None,
        driver: str | None = None,
        latency: Mapping[str, int] | None = None,
        **others: object,
    ) -> None:
        """Change what the host plays, for calls from now on. `others` are in DEFAULTS. Raises ValueError for other names.

        `driver` is 570, 580, 610 or 615. `latency` is microseconds by call, `nvml` for every call of NVML.
        """
        unknown = sorted(set(others) - set(DEFAULTS))
        if unknown:
            raise ValueError(f"the double has no setting {unknown[0]!r}; there are {', '.join(sorted(DEFAULTS))}")
        if devices is not None:
            self._set_devices(devices)
        if driver is not None:
            version, cuda_version = _RELEASES[driver]
            newer = {
                "tells_moving": driver != "570",
                "ipc_works": driver in ("610", "615"),
                "limits_known": driver == "615",
                "jobs_known": driver in ("610", "615"),
            }
            self._settings |= {"driver": version, "cuda_version": str(cuda_version), **_texts(newer)}
        if latency is not None:
            self._settings = {name: text for name, text in self._settings.items() if not name.startswith("latency.")}
            self._settings |= {f"latency.{call}": str(us) for call, us in latency.items()}
        self._settings |= _texts(others)
        self._write()

    def reset(self) -> None:
        """Play DEFAULTS again; the devices and the driver stay."""
        self._settings |= _texts(DEFAULTS)
        self._write()

    def set_device(self, index: int, **values: object) -> None:
        """Change what NVML reports about one device: extra_mib, samples, fails, busy_percent ... A negative number is "not supported"."""
        unknown = sorted(set(values) - _OF_DEVICES)
        if unknown:
            raise ValueError(
                f"a device of the double has no {unknown[0]!r}; there are {', '.join(sorted(_OF_DEVICES))}"
            )
        self._settings |= {f"device.{index}.{name}": text for name, text in _texts(values).items()}
        self._write()

    def fail(self, call: str, result: int, *, times: int | None = 1, pid: int | None = None) -> None:
        """Let the next calls give this result and do nothing (0: success, and nothing done). `times` None: all.

        `pid` is the process that a checkpoint call is about, for others the one that calls.
        """
        for _ in range(1 if times is None else times):
            self._fault(call, f"{'a' if times is None else ''}{next(self._numbers):06}-{result}", pid)

    def hang(self, call: str, *, late: bool = False, pid: int | None = None) -> Path:
        """Let the call hang, before what it does or after it (`late`), until the file that is returned is removed."""
        return self._fault(call, f"{next(self._numbers):06}-{'late' if late else 'hang'}", pid)

    def clear_faults(self) -> None:
        """End all faults; what hangs continues."""
        for folder in (self.folder / "faults").iterdir():
            for one in folder.iterdir():
                one.unlink(missing_ok=True)

    def calls(self, name: str = "") -> list[Call]:
        """Return the calls of all processes whose name begins so, in the order in which they ended."""
        lines = (self.folder / "calls").read_text(encoding="utf-8").splitlines()
        return [call for call in map(_parsed, lines) if call.name.startswith(name)]

    def processes(self) -> list[DoubleProcess]:
        """Return the CUDA processes that live, by pid."""
        context_mib = int(float(self._settings.get("context_mib", "512")))
        found, records = [], list[bytes]()
        for path in sorted((self.folder / "processes").iterdir()):
            with suppress(FileNotFoundError):  # its process has ended since
                records.append(path.read_bytes()[: _RECORD.size])
        for raw in records:
            if len(raw) < _RECORD.size:
                continue
            magic, pid, start, _thread, _inherited, state, resident, saved, _managed, _shared, _on, *numbers = (
                _RECORD.unpack(raw)
            )
            try:
                alive = identify(pid).start_time == start
            except (ProcessLookupError, ValueError):
                alive = False
            if magic != _MAGIC or not alive:
                continue
            contexts, held = numbers[:16], numbers[16:32]
            mib = {
                device.device_id: held[index] // _MIB + contexts[index] * context_mib
                for index, device in enumerate(self.devices)
                if resident and (contexts[index] or held[index])
            }
            found.append(
                DoubleProcess(
                    pid=pid,
                    state=_STATES[state],
                    mib=mib,
                    saved_mib=saved // _MIB,
                    at_work=numbers[32] > 0,
                    lock_waits=numbers[33] > 0,
                    in_operation=numbers[35] != numbers[36],
                )
            )
        return sorted(found, key=lambda one: one.pid)

    def process(self, pid: int) -> DoubleProcess | None:
        """Return one of `processes()`, None if it is not among them."""
        return next((one for one in self.processes() if one.pid == pid), None)

    def force_state(self, pid: int, state: str) -> None:
        """Let the driver tell this state of a process, which does what goes with it: it waits, or fails."""
        (record,) = (self.folder / "processes").glob(f"{pid}.*")
        with record.open("r+b") as file:
            file.seek(_STATE_AT)
            file.write(_STATES.index(state).to_bytes(4, "little"))

    def _set_devices(self, devices: Sequence[Device]) -> None:
        self._settings = {name: text for name, text in self._settings.items() if not name.startswith("device.")}
        self.devices = tuple(devices)
        for index, device in enumerate(self.devices):
            told = {"uuid": device.device_id, "mib": device.mib, "name": device.name, "chip": device.chip}
            if device.instances is not None:
                told["mig"] = int(bool(device.instances))
                told["instances"] = ",".join(f"MIG-{uuid.uuid4()}:{mib}" for mib in device.instances)
            self._settings |= {f"device.{index}.{name}": str(value) for name, value in told.items()}

    def _write(self) -> None:
        fresh = self.folder / f"settings.{os.getpid()}"
        fresh.write_text("".join(f"{name}={text}\n" for name, text in self._settings.items()), encoding="utf-8")
        os.utime(
            fresh, ns=(time.time_ns(), time.time_ns())
        )  # finer than the file system's own clock: each change is seen
        fresh.rename(self.folder / "settings")

    def _fault(self, call: str, name: str, pid: int | None) -> Path:
        folder = self.folder / "faults" / call
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        path = folder / (name if pid is None else f"{name}-{pid}")
        path.touch()
        return path


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {name: _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, Sequence | set | frozenset):
        return ",".join(":".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in value)
    raise TypeError(f"a setting of the double is a number, a text, or a list of numbers; got {value!r}")


def _parsed(line: str) -> Call:
    began, elapsed, pid, name, result, *arguments = line.split(" ")
    return Call(
        began_us=int(began),
        elapsed_us=int(elapsed),
        pid=int(pid),
        name=name,
        result=None if result == "hangs" else int(result),
        arguments=dict(one.partition("=")[::2] for one in arguments if one),
    )
