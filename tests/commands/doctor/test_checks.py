"""What the doctor finds, by check: machines where it passes, machines where it does not, and the remedy that it names."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fractional_gpu.client import state_folder
from fractional_gpu.client.state_folder import make_state_folder, node_name
from fractional_gpu.commands.doctor import machine, setup
from fractional_gpu.commands.doctor.doctor import CHECKS
from fractional_gpu.commands.doctor.report import Finding, Severity
from fractional_gpu.config import Settings, load
from fractional_gpu.config.service import PARTS, RECORD
from fractional_gpu.core.forecasts.outcomes import ForecastError
from fractional_gpu.gpu.interface import DeviceInfo
from fractional_gpu.host.claims import DeviceClaim
from fractional_gpu.host.memory import Headroom, LimitReader
from fractional_gpu.jupyter.kernelspecs import install
from fractional_gpu.ledger.ledger import Ledger
from tests.gpu_nvidia.fake_nvml import FUNCTION_NOT_FOUND, NOT_SUPPORTED, FakeGPU, FakeNVML
from tests.support.fake_broker import FakeBroker

pytestmark = pytest.mark.promise("extension-name", "forecasts")

BROKER, LIBRARY_NOT_FOUND, GIB = 77, 12, 1024
NEAR_0, NEAR_1 = "0000:65:00.0", "0000:ca:00.0"
ALWAYS = {"enabled": "[always] madvise never", "khugepaged/defrag": "1"}
ASK = {"defrag": "always defer [madvise] never", "shmem_enabled": "always [never] deny"}
SPEC = "fractional-gpu-default-{}-plain/kernel.json"


class DoctorsNVML(FakeNVML):
    """Answers the questions that only the doctor has."""

    persistence = 1
    level = 13000

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        self._enter("nvmlSystemGetCudaDriverVersion_v2")
        return self.level

    def nvmlDeviceGetPersistenceMode(self, gpu: FakeGPU) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetPersistenceMode", gpu)
        return self.persistence


def device(index: int, memory_mib: int, device_id: str = "") -> DeviceInfo:
    name = device_id or f"GPU-{index}"
    return DeviceInfo(
        device_id=name, index=index, name="H100", memory_mib=memory_mib, simulated=False, checkpointable=True
    )


class Machine:
    """A machine as the doctor sees it: its files, processes and driver."""

    def __init__(self, root: Path, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.proc, self.sys, self.home, self.patch = root, root / "proc", root / "sys", home, patch
        self.socket = str(root / "broker.sock")
        self.file("proc/self/mountinfo", f"30 23 0:26 / {root}/group rw - cgroup2 cgroup2 rw")
        self.file("group/empty", "")
        self.process(1, "systemd")

    def file(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        return path

    def process(self, pid: int, name: str, *words: str, **files: str) -> "Machine":
        command = "".join(f"{word}\0" for word in words)
        for file, text in {"comm": name[:15], "cgroup": "0::/", **files}.items():
            self.file(f"proc/{pid}/{file}", text)
        (self.proc / str(pid) / "cmdline").write_text(command)
        return self

    def settings(self, text: str) -> Any:  # noqa: ANN401 - Settings
        file = self.home / "config" / "jupyter_gpu_config.py"
        file.write_text(text)
        return load(file)

    def workstation(self, made: Iterable[Path], *, admin_group: str = "root") -> Iterable[Finding]:
        for name, value in (("RECORD", RECORD), ("PARTS", PARTS)):
            paths = [value] if isinstance(value, Path) else value
            moved = tuple(self.root / path.relative_to("/") for path in paths)
            self.patch.setattr(setup, name, moved[0] if isinstance(value, Path) else moved)
        for path in made:
            self.file(str(path.relative_to("/")), "")
        return setup.check_workstation(self.settings(f"c.GPUBroker.admin_group = {admin_group!r}"))

    def versions(self, *names: str) -> Iterable[Finding]:
        self.patch.setattr(metadata, "entry_points", lambda **_: [SimpleNamespace(name=name) for name in names])
        return setup.check_versions()

    def configuration(self, text: str) -> Iterable[Finding]:
        (self.home / "config" / "jupyter_gpu_config.py").write_text(text)
        return setup.check_settings()[1]

    def nvidia(self, check: str, gpu: FakeGPU | None = None, bindings: str = "", *,
               kind: type[FakeNVML] = DoctorsNVML, version: str = "580.65.06", fails: dict[str, int] | None = None,
               **answers: int) -> list[Finding]:  # fmt: skip
        nvml = kind(FakeGPU() if gpu is None else gpu, version=version)
        nvml.fails.update(fails or {})
        vars(nvml).update(answers)
        seen = machine.check_nvidia(nvml=nvml, bindings=lambda: bindings, proc=self.proc, sysfs=self.sys)
        assert nvml.started == 0, "NVML was not given back"
        return [one for one in seen.findings if check in ("", one.check)]

    def memory(self, system_mib: int, here_mib: int, *devices: DeviceInfo) -> Iterable[Finding]:
        self.patch.setattr(machine, "system_headroom", lambda **_: Headroom(system_mib, "the system's memory"))
        self.patch.setattr(LimitReader, "headroom", lambda *_: Headroom(here_mib, "the memory limit of a group"))
        return machine.check_memory(devices, None)

    def huge_pages(self, **files: str) -> Iterable[Finding]:
        for name, text in files.items():
            self.file(f"sys/kernel/mm/transparent_hugepage/{name}", text)
        return machine.check_huge_pages(self.sys)

    def nodes(self, node_mib: int, *near: int) -> Iterable[Finding]:
        for number in (0, 1):
            self.file(
                f"sys/devices/system/node/node{number}/meminfo", f"Node {number} MemTotal: {node_mib * 1024:>15} kB"
            )
        addresses = {f"GPU-{index}": address for index, address in enumerate((NEAR_0, NEAR_1))}
        for address, node in zip(addresses.values(), near, strict=True):
            self.file(f"sys/bus/pci/devices/{address}/numa_node", str(node))
        return machine.check_nodes([device(0, 80 * GIB), device(1, 80 * GIB)], addresses, self.sys)

    def swap(self, swap_mib: int, free_mib: int = 0, swappiness: str = "60") -> Iterable[Finding]:
        self.file("proc/meminfo", f"MemTotal: 1024 kB\nSwapTotal: {swap_mib * 1024} kB\nSwapFree: {free_mib * 1024} kB")
        self.file("proc/sys/vm/swappiness", swappiness)
        return machine.check_swap(proc=self.proc)

    def pools(self, **keys: str) -> Iterable[Finding]:
        return machine.check_pools(self.settings(f"c.GPUBroker.pools = {{'default': {keys!r}}}"), [], self.proc)

    def served(self) -> list[Finding]:
        with FakeBroker(self.socket) as broker:
            path, found = setup.check_broker(broker.path)
        assert path == broker.path
        return found[:1]

    def inherited(self, *how: str) -> list[Finding]:
        with subprocess.Popen([*how, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"runs\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"runs\n"
            return list(setup.inherited_findings(process.pid))

    def network(self) -> Path:
        """Return a folder on NFS."""
        folder = self.root / "nfs"
        folder.mkdir(mode=0o700)
        mounts = self.file("mountinfo", f"1 0 8:1 / / rw - ext4 d rw\n2 1 0:5 / {folder} rw - nfs4 server:/home rw")
        self.patch.setattr(state_folder, "_MOUNTS", mounts)
        return folder

    def socket_in(self, name: str) -> Iterable[Finding]:
        folder = self.network() / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return setup.check_broker(str(folder / "broker.sock"))[1]

    def claims(self, *brokers: int | None) -> list[Finding]:
        one = device(0, 1, f"GPU-of-process-{os.getpid()}")
        assert list(machine.check_claims([one], None)) == []
        with DeviceClaim.claim(one.device_id):
            return [found for broker in brokers for found in machine.check_claims([one], broker)]

    def oom(self, pid: int | None = BROKER, *, all_ids: str = "0 0 4294967295") -> Iterable[Finding]:
        for number, rights, uid in ((BROKER, 0x1FFFFFFFFFF, 0), (os.getpid(), 0, 1000)):
            status = f"Uid:\t{uid}\t{uid}\nCapEff:\t{rights:016x}"
            self.process(number, "python", status=status, uid_map=all_ids, oom_score_adj="0")
        return machine.check_oom(pid, proc=self.proc)

    def ledger(self, change: Callable[[Path], object] = lambda _: None) -> list[Finding]:
        file = make_state_folder(self.socket) / "ledger.sqlite"
        with Ledger.open(file):
            assert next(iter(setup.check_ledgers(self.socket, None))).severity is Severity.OK, "while its broker has it"
        change(file)
        before = file.read_bytes()
        found = list(setup.check_ledgers(self.socket, None))
        assert file.read_bytes() == before
        return found

    def kernels(
        self, *fractions: int, argv: list[str] | None = None, settings: str = "", pool: str = "default"
    ) -> list[Finding]:
        folder = self.home / "data" / "kernels"
        base = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (folder / "plain").mkdir(parents=True)
        (folder / "plain" / "kernel.json").write_text(
            json.dumps({"argv": base, "display_name": "P", "language": "python"})
        )
        install(pool, fractions, directory=str(folder), base="plain")
        for fraction in fractions if argv is not None else ():
            file = folder / SPEC.format(fraction)
            file.write_text(json.dumps({**json.loads(file.read_text()), "argv": argv}))
        return list(setup.check_kernelspecs(self.settings(settings) if settings else None))

    def python_path(self, name: str, text: str = "") -> "Machine":
        self.file(f"modules/{name}", text)
        self.patch.setenv("PYTHONPATH", str(self.root / "modules"))
        return self

    def without_extension(self) -> list[str]:
        text = "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'fractional_gpu_kernel'\" >&2\nexit 1"
        python = self.file("python", text)
        python.chmod(0o755)
        return [str(python), "-P", "-c", "pass"]

    def shadowed(self) -> list[Finding]:
        self.patch.setenv("JUPYTER_PATH", str(self.root / "first"))
        found = self.kernels(250)
        assert not [one for one in found if "does not show" in one.finding]
        install("default", [250], directory=str(self.root / "first" / "kernels"), base="plain")
        return [one for one in setup.check_kernelspecs(None) if "does not show" in one.finding]

    def cullers(self, name: str = "", text: str = "", **environment: str) -> Iterable[Finding]:
        if name:
            self.file(name, text)
        return setup.check_cullers(environment=environment, folders=[str(self.root)], proc=self.proc)


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:4096])


def newer(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()


def forecasts(covered_permille: int) -> Iterable[Finding]:
    error = ForecastError(what="wait", count=300, median_error_permille=100, covered_permille=covered_permille)
    return setup.forecast_findings([error])


Row = tuple[Any, ...]  # what makes the findings of a machine; for each finding its severity and what it says
OK, NOTE, WARNING, ERROR = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.ERROR
EACH_CULLER = {
    "jupyter_server_config.py": ("\nc.MappingKernelManager.cull_idle_timeout = 600  # 10 min", "line 2"),
    "jupyter_lab_config.py": ("c.AsyncMappingKernelManager.cull_idle_timeout=60*60", "is 60*60"),
    "jupyter_config.py": ("c.ServerApp.shutdown_no_activity_timeout = 3600", "shutdown_no_activity_timeout is 3600"),
    "jupyter_server_config.json": ('{"MappingKernelManager": {"cull_idle_timeout": 600}}', "cull_idle_timeout is 600"),
    "jupyter_server_config.d/x.json": ('{"MappingKernelManager": {"cull_idle_timeout": 9}}', "cull_idle_timeout is 9"),
}
NOT_FOR_INSTANCES = dict.fromkeys(
    ("nvmlDeviceGetPersistenceMode", "nvmlDeviceGetComputeMode", "nvmlDeviceGetMigMode"), NOT_SUPPORTED
)
SOUND = FakeGPU()
DIVIDED = FakeGPU(mig=1, instances={0: FakeGPU(uuid="MIG-0", name="MIG 1g.10gb", fails=NOT_FOR_INSTANCES)})
NO_LEVEL = {"nvmlSystemGetCudaDriverVersion_v2": FUNCTION_NOT_FOUND}
OFFERS = "c.GPUBroker.pools = {'default': {'fractions': ['1/2', '1']}}"
# fmt: off
ROWS: dict[str, list[Row]] = {
    "versions": [
        (lambda m: m.versions("fractional-gpu-provisioner"), (OK, "jupyter-fractional-gpu ")),
        (lambda m: m.versions(), (OK,), (ERROR, "provisioner: ", "install jupyter-fractional-gpu with pip in the environment")),
    ],
    "simulated": [
        (lambda _: setup.check_simulation(None),),
        (lambda _: setup.check_simulation("2x2GiB"), (NOTE, "2 GiB, 2 GiB")),
        (lambda _: setup.check_simulation("two"), (ERROR, "-> correct it, or unset it")),
    ],
    "configuration": [
        (lambda m: m.configuration(""), (OK, "jupyter_gpu_config.py; pools: default")),
        (lambda m: m.configuration("c.GPUBroker.devcies = 'all'"), (ERROR, "/config/jupyter_gpu_config.py", "-> fix it")),
    ],
    "devices": [
        (lambda m: m.nvidia("", SOUND), (OK, "driver: 580.65.06, CUDA 13.0 ->"), (OK, "cuda-bindings"), (OK, "device: ", SOUND.uuid),
            (OK, "persistence"), (OK, "numa"), (OK, "mps")),
        (lambda m: m.nvidia("", bindings="cuda-bindings is not installed: pip install it", fails={"nvmlInit": LIBRARY_NOT_FOUND}),
            (WARNING, "cannot start here", "jupyter gpu demo, or JUPYTER_GPU_SIMULATE=1x2GiB in the environment"),
            (NOTE, "cuda-bindings: ", "not installed")),
        (lambda m: m.nvidia("", fails={"nvmlDeviceGetCount": 999}), (ERROR, "driver: ", "NVML error 999", "`nvidia-smi` and `dmesg`")),
        *((lambda m, old=old: m.nvidia("driver", version=old), (ERROR, old, "until it is replaced")) for old in ("550.90.07", "610.57.02")),
        (lambda m: m.nvidia("driver", version="550.90.07"), (ERROR, "(now 550.90.07, CUDA 13.0) ->")),
        (lambda m: m.nvidia("device", version="550.90.07"), (WARNING, "cannot be suspended")),
        (lambda m: m.nvidia("driver", level=13010), (OK, "580.65.06, CUDA 13.1 ->")),
        (lambda m: m.nvidia("driver", fails=NO_LEVEL), (OK, "driver: 580.65.06 ->")),
        (lambda m: m.nvidia("driver", kind=FakeNVML), (OK, "driver: 580.65.06 ->")),
        (lambda m: m.nvidia("moving", level=13000),),
        (lambda m: m.nvidia("moving", level=12080), (NOTE, "driver 580 or newer")),
        (lambda m: m.nvidia("cuda-bindings", bindings="the bindings are missing: pip install 'x[cuda]'"),
            (ERROR, "missing: kernels cannot be suspended -> pip install 'x[cuda]' (in the broker's environment)")),
        (lambda m: m.nvidia("persistence", persistence=0), (WARNING, "nvidia-smi -i 0 -pm 1")),
        *((lambda m, mode=mode: m.nvidia("compute-mode", FakeGPU(compute_mode=mode)), (ERROR, words, "-> "))
            for mode, words in ((1, "one thread"), (2, "no process"), (3, "one process"))),
        (lambda m: m.nvidia("device", DIVIDED), (WARNING, "MIG 1g.10gb", "MIG instance, which the driver cannot checkpoint")),
        (lambda m: m.process(70, "nvidia-cuda-mps-server").process(60, "nvidia-cuda-mps-control").process(50, "nvidia-smi").nvidia("mps"),
            (WARNING, "(process 60)", "echo quit | nvidia-cuda-mps-control")),
        (lambda m: m.nodes(256 * GIB, 0, 1), (NOTE, "device 0 is attached to NUMA node 0 (of 2), which has 256 GiB"),
            (NOTE, "--preferred=1", "has not been measured")),
        (lambda m: m.nodes(128 * GIB, 1, 1), (WARNING, "device 0, 1 is attached to NUMA node 1", "less than the 160 GiB of the devices")),
    ],
    "host-memory": [
        (lambda m: m.memory(2000, 2000, device(0, 1500)), (OK, "devices hold 1.5 GiB"), (OK, "cgroup: ")),
        (lambda m: m.memory(2000, 2000, device(0, 1500), device(0, 1500)), (WARNING, "2.9 GiB", "raise host_memory"), (OK, "cgroup: ")),
        (lambda m: m.memory(2000, 1000, device(0, 1500)), (OK,), (WARNING, "cgroup: ", "raise the memory limit of the kernels'")),
        (lambda m: m.memory(2000, 1700, device(0, 1500)), (OK,), (NOTE, "cgroup: ")),
    ],
    "huge-pages": [
        (lambda m: m.huge_pages(**ALWAYS, defrag="always [defer] never"),
            (OK, "huge-pages: transparent huge pages: always (defrag defer, khugepaged/defrag 1) ->")),
        (lambda m: m.huge_pages(**ALWAYS, defrag="always defer madvise [never]"), (NOTE, "-> ", "defrag")),
        *((lambda m, text=text: m.huge_pages(enabled=text, **ASK), (NOTE,
            f"transparent huge pages: {chosen} (defrag madvise, shmem_enabled never)",
            "page faults limit its speed: 3.6 GiB of an H200", "echo always > ", "compare suspend times"))
            for chosen, text in (("madvise", "always [madvise] never"), ("never", "always madvise [never]"))),
    ],
    "swap": [
        (lambda m: m.swap(8192, 8192, "1"), (OK,)),
        (lambda m: m.swap(0), (NOTE, "kills a process immediately", "host_memory")),
        *((lambda m, value=value: m.swap(8192, 6144, value), (NOTE, "swap: 8 GiB, 2 GiB in use, vm.swappiness ", "a resume must wait",
            "vm.swappiness=1")) for value in ("60", "2", "")),
    ],
    "pools": [
        (lambda m: m.pools(),),
        (lambda m: m.process(60, "nvidia-cuda-mps-control").pools(sharing="mps"),),
        (lambda _: machine.check_pools(None, []),),
        (lambda m: m.pools(sharing="mps"), (ERROR, "mps-pool: ", "-> nvidia-cuda-mps-control -d")),
        (lambda m: m.pools(sharing="mig"), (ERROR, "mig-pool: ", "-> as root: nvidia-smi -mig 1")),
        (lambda m: m.pools(hami_library="/gone/libvgpu.so"), (ERROR, "hami: ", "-> install HAMi-core there")),
    ],
    "broker": [
        (lambda m: m.served(), (NOTE, "broker: ", "/broker.sock with 0 leases")),
        (lambda m: setup.check_broker(str(m.root / "x" / "y"))[1], (NOTE, "none is running")),
        (lambda m: setup.check_broker(str(m.file("file", "") / "b.sock"))[1], (ERROR, "fix that first")),
        (lambda _: setup.check_broker("/run/jupyter-gpu-nowhere/b.sock")[1], (ERROR, "an administrator must start it")),
        (lambda m: m.inherited(),),
        (lambda m: m.inherited("nice", "-n", "5"), (WARNING, "niceness 5 from the program that started it", "broker --restart")),
        (lambda m: m.inherited("prlimit", f"--cpu={10**7}"), (WARNING, "a hard RLIMIT_CPU from")),
        (lambda m: m.socket_in(f"gpu-{node_name()}"), (NOTE, "none is running")),
        (lambda m: m.socket_in("."), (WARNING, "a broker on another host that shares it would replace it", "set JUPYTER_GPU_SOCKET"),
            (NOTE, "none is running")),
        (lambda _: forecasts(800), (OK, "forecasts: ", "wait 80 %")),
        (lambda _: forecasts(651), (OK, "wait 65 %")),
        (lambda _: forecasts(960), (NOTE, "wider than needed")),
        (lambda _: forecasts(640),
            (WARNING, "64 % of the last 256 outcomes were within the bounds of wait forecasts; the bounds promise 80 %")),
    ],
    "claims": [
        (lambda m: m.claims(os.getpid()),),
        (lambda m: m.claims(None, os.getppid()), *((WARNING, "broker: ", f"process {os.getpid()} ", "administrator"),) * 2),
    ],
    "oom": [
        (lambda m: m.oom(), (OK,)),
        (lambda m: m.oom(all_ids="0 1000 1"), (NOTE, "has no CAP_SYS_RESOURCE")),
        (lambda m: m.oom(None), (NOTE, "a broker started here (user 1000, oom_score_adj 0) has no CAP_SYS_RESOURCE",
            "is the biggest process,", "run the broker as root")),
        (lambda m: m.file("proc/sys/vm/panic_on_oom", "1") and m.oom(), (WARNING, "-> as root: sysctl vm.panic_on_oom=0"), (OK,)),
        (lambda m: m.file("group/memory.oom.group", "1") and m.oom(), (WARNING, "oom-group: ", "singleProcessOOMKill"), (OK,)),
        (lambda m: m.file("group/memory.oom.group", "0") and m.oom(), (OK,)),
        (lambda m: m.process(60, "systemd-oomd").oom(), (NOTE, "systemd-oomd"), (OK,)),
    ],
    "ledger": [
        (lambda m: m.ledger(), (OK, "with 0 live leases")),
        (lambda m: m.ledger(newer), (ERROR, "another version (schema 999", "-> ")),
        (lambda m: m.ledger(damage), (ERROR, "-> ")),
        (lambda m: setup.check_ledgers(m.socket, m.settings(f"c.GPUBroker.state_dir = {str(m.network())!r}")),
            (NOTE, "the first broker creates it"), (WARNING, "network filesystem (nfs4)", "c.GPUBroker.state_dir")),
    ],
    "kernelspecs": [
        (lambda m: m.kernels(250), (OK,)),
        (lambda _: setup.check_kernelspecs(None), (NOTE, "-> jupyter gpu kernels install")),
        (lambda m: m.kernels(250, argv=["/gone/bin/python", "-P"]), (ERROR, "/gone/bin/python", "jupyter gpu kernels remove")),
        (lambda m: m.kernels(250, argv=[]), (ERROR, "does not name a command", "to write it again")),
        (lambda m: m.kernels(250, 500, argv=m.without_extension()), (ERROR, "No module named 'fractional_gpu_kernel'", "-> install")),
        (lambda m: m.python_path("fractional_gpu_kernel.py").kernels(250),
            (WARNING, "imports ", "/modules/fractional_gpu_kernel.py as fractional_gpu_kernel")),
        (lambda m: m.python_path("msgspec.py", "__version__ = '0.18.6'").kernels(250),
            (WARNING, f"{sys.executable} -m pip install 'msgspec>=0.19'")),
        (lambda m: m.kernels(250, settings=OFFERS), (WARNING, "asks for 1/4, but its pool only offers 1/2, 1", "kernels remove")),
        (lambda m: m.kernels(500, pool="x", settings=OFFERS), (WARNING, "pool 'x', which is not configured", "-> jupyter gpu")),
        (lambda m: m.shadowed(), (WARNING, "/first", "remove one of them")),
    ],
    "workstation": [
        (lambda m: m.workstation(PARTS, admin_group=""),),
        (lambda m: m.workstation((RECORD, *PARTS)), (OK, "has set up the service")),
        (lambda m: m.workstation((RECORD, *PARTS[1:])), (ERROR, "jupyter-gpu.service is missing", "sudo jupyter-gpu setup-machine")),
        (lambda m: m.workstation((RECORD, *PARTS), admin_group=""), (OK,)),
        (lambda m: m.workstation((RECORD, *PARTS[:-1]), admin_group="no-such-group"), (ERROR, "/kernels is missing"),
            (ERROR, "this host has no such group")),
    ],
    "cullers": [
        (lambda m: m.cullers(), (OK,)),
        (lambda _: setup.check_cullers(Settings({"cull_above": (90, "a file")})), (OK, "they spare kernels that hold GPU state")),
        (lambda m: m.process(12, "python3", "jupyter_server", "--MappingKernelManager.cull_idle_timeout=0").cullers(), (OK,)),
        (lambda m: m.process(10, "python3", "jupyter_server", "--MappingKernelManager.cull_idle_timeout=300").cullers(),
            (WARNING, "process 10: MappingKernelManager.cull_idle_timeout is 300", "set it to 0")),
        (lambda m: m.process(11, "python3", "python3", "-m", "jupyterhub_idle_culler", "--timeout=3600").cullers(),
            (WARNING, "process 11 is an idle culler of a hub")),
        *((lambda m, name=name, text=text: m.cullers(name, text), (WARNING, name, place, "idle_after"))
            for name, (text, place) in EACH_CULLER.items()),
        (lambda m: m.cullers(JUPYTERHUB_SERVICE_PREFIX="/user/ann/"), (NOTE, "-> ask the hub's administrator")),
    ],
}
# fmt: on


@pytest.mark.parametrize("check", [check.name for check in CHECKS if check.where == "machine"])
def test_each_check_passes_on_a_good_machine_and_names_a_remedy_on_a_bad_one(check: str, jupyter_home: Path) -> None:
    worst, roots = set(), Path(tempfile.mkdtemp(prefix="jfg-"))  # pytest's own folder is too long for a socket
    for number, (make, *expected) in enumerate(ROWS[check]):
        (home := jupyter_home / str(number) / "data").mkdir(parents=True)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("data", "config"):
                (home.parent / name).mkdir(exist_ok=True)
                patch.setenv(f"JUPYTER_{name.upper()}_DIR", str(home.parent / name))
            patch.setenv("JUPYTER_PATH", str(home))
            patch.setenv("JUPYTER_CONFIG_PATH", str(home.parent / "config"))
            found = list(make(Machine(roots / str(number), home.parent, patch)))
        said = [f"{one.check}: {one.finding} -> {one.advice}" for one in found]
        assert [one.severity for one in found] == [severity for severity, *_ in expected], said
        for text, (_, *words) in zip(said, expected, strict=True):
            assert all(word in text for word in words), text
        worst.add(any(one.advice for one in found))
    shutil.rmtree(roots)
    assert worst == {False, True}, "each check needs a machine where it passes, and a remedy for one where it does not"
