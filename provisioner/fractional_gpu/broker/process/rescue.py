"""The last resort: resumes suspended kernels without a broker, while holding the locks and claims that a broker would hold.

As in recovery, the driver reports each kernel's state, and half-done work is finished or undone first. A restore without enough room would
kill the process, so the saved size (from the ledger or the backup record) must be free. If the size is unknown, the device must be empty.
If the device is unknown, all devices must be empty. Kernels that cannot be brought back stay saved. A kernel without a record is given one
for the next broker, with the smallest fraction that covers its memory, or a whole device if the size is unknown.
"""

import asyncio
import json
import os
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fractional_gpu.broker.clock import wall_ms
from fractional_gpu.broker.kernels.connection import is_command
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.request_validation import user_group
from fractional_gpu.broker.persistence.lease_files import lease_folder, write_lease_file
from fractional_gpu.broker.process.driver_start import Backend, open_backend, simulated_folder
from fractional_gpu.broker.process.repair import BrokerLock
from fractional_gpu.broker.process.restarting import BrokerOptions, make_socket_folder
from fractional_gpu.broker.process.run import device_specs
from fractional_gpu.broker.recovery.lost_leases import Carrier, carriers, command_of, living_records
from fractional_gpu.broker.recovery.recovery import kernel_of
from fractional_gpu.broker.swap.suspend import SwapTimes
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.client.discovery import restart_command, socket_path
from fractional_gpu.client.http import claim_address, claim_holder
from fractional_gpu.client.state_folder import ledger_name, state_folder
from fractional_gpu.config import Settings, load
from fractional_gpu.core.effects import Resume
from fractional_gpu.core.events import ResumeOutcome
from fractional_gpu.core.model import LeaseSpec, LeaseState, ReserveBy
from fractional_gpu.core.units import format_memory
from fractional_gpu.gpu.worker_link import WorkerClaim, WorkerLink
from fractional_gpu.host.accounts import account_name, account_uid
from fractional_gpu.host.claims import DeviceClaim, NameClaim
from fractional_gpu.ledger import opening
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import Launch, LeaseRecord, LedgerError
from fractional_gpu.protocol.errors import ConflictError
from fractional_gpu.protocol.limits import MAX_LEASES_PER_UID
from fractional_gpu.protocol.status import KernelFacts

_ORPHAN_PATIENCE_S = 60.0  # how long a killed broker's worker may take to finish
_DEFAULT_MILLI = 250  # for a kernel without device memory
_TOLD = ("config_file", "simulate", "state_dir", "worker_socket")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescued:
    """What happened to one kernel.

    `outcome` is restored, running, saved, no-room, failed or unknown. Saved means that there was no room, but that the next broker will
    find the kernel's record.
    """

    lease_id: str
    label: str
    pid: int | None
    outcome: str
    saved_mib: int | None  # None if unknown
    sentence: str

    @property
    def is_well(self) -> bool:
        return self.outcome in ("restored", "running", "saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    ledger: str
    problem: str
    kernels: list[Rescued]


@dataclass(slots=True, kw_only=True)
class _FoundKernel:
    kernel: Kernel
    label: str
    device_id: str | None
    saved_mib: int | None
    carrier: Carrier | None = None  # set for a kernel without a record


def rescue(options: BrokerOptions) -> Rescue:
    """Resume the socket's suspended kernels. Blocks.

    Raises ConflictError if a broker is running, as well as configuration, device and operating system errors.
    """
    socket = options.socket or socket_path()
    options = _with_last_options(replace(options, socket=socket))
    with ExitStack() as stack:
        _take_place(socket, stack)
        settings = load(options.config_file, {"state_dir": options.state_dir} if options.state_dir else {})
        simulate = options.simulate
        if simulate is None and simulated_folder(socket).exists():
            raise ConflictError(f"the broker on {socket} used simulated devices; list them with --simulate")
        backend = stack.enter_context(open_backend(simulate, socket, device_kind=settings.device_kind))
        for device in backend.devices:
            stack.enter_context(DeviceClaim.claim(device.device_id))
        path = state_folder(socket, settings.state_dir) / ledger_name(simulated=backend.simulated)
        ledger, problem = None, "" if opening.exists(path) else f"there is no ledger at {path}"
        if not problem:
            try:
                ledger = stack.enter_context(closing(Ledger.open(path)))
            except LedgerError as error:
                problem = str(error)
        files = lease_folder(socket, simulated=backend.simulated)
        found = _everything(ledger, files, socket)
        turn = WorkerClaim(Path(f"{socket}.worker"))
        worker = WorkerLink(backend.name, claim=turn, service=options.worker_socket)
        kernels = asyncio.run(_rescue_all(settings, backend, found, ledger, worker=worker, turn=turn, files=files))
        if ledger is None and opening.exists(path):  # no broker can start with this ledger
            kernels = [replace(one, outcome="no-room") if one.outcome == "saved" else one for one in kernels]
    return Rescue(ledger=str(path), problem=problem, kernels=kernels)


def _with_last_options(options: BrokerOptions) -> BrokerOptions:
    command = restart_command(options.socket or "")
    if command is None:
        return options
    try:
        told = json.loads(command[0][-1])
        said: dict[str, Any] = {
            name: str(told[name]) for name in _TOLD if name in told and getattr(options, name) is None
        }
    except (ValueError, TypeError):
        return options  # not started by a broker of ours
    return replace(options, **said)


def _take_place(socket: str, stack: ExitStack) -> None:
    make_socket_folder(socket)
    lock = BrokerLock(socket)
    stack.callback(lock.close)
    claim = NameClaim.take(claim_address(socket)) if lock.take() else None
    if isinstance(claim, NameClaim):
        stack.enter_context(claim)
        return
    if claim is not None and claim[1] not in (None, 0, os.geteuid()):
        return  # another user's process, which is no broker of ours, has the name
    holder = claim_holder(socket)
    process = "" if holder is None else f" (process {holder})"
    raise ConflictError(
        f"a broker is running on {socket}{process}: use `jupyter gpu resume --all`; if the broker no longer works, stop it first "
        "with `jupyter gpu broker --stop`"
    )


def _everything(ledger: Ledger | None, files: Path, socket: str) -> list[_FoundKernel]:
    """Return all kernels found in the ledger, in the backup records, and among this user's live processes (all users' if run as root)."""
    records = [*(ledger.live_leases() if ledger else []), *living_records(files, ledger)]
    found = [
        _FoundKernel(
            kernel=kernel_of(record),
            label=record.spec.label,
            device_id=next(iter(record.home_ids), record.device_id),
            saved_mib=record.saved_mib,
        )
        for record in records
    ]
    known = {record.spec.lease_id for record in records}
    uid = None if os.getuid() == 0 else os.getuid()
    for one in reversed(carriers(uid, socket)):  # the record of the oldest one comes last
        if one.lease_id not in known and (ledger is None or not ledger.has_lease(one.lease_id)):
            kernel = Kernel(lease_id=one.lease_id, uid=one.uid, token_sha256="", identity=one.identity)
            found.append(_FoundKernel(kernel=kernel, label="", device_id=None, saved_mib=None, carrier=one))
    return found


async def _rescue_all(
    settings: Settings,
    backend: Backend,
    found: list[_FoundKernel],
    ledger: Ledger | None,
    *,
    worker: WorkerLink,
    turn: WorkerClaim,
    files: Path,
) -> list[Rescued]:
    times = SwapTimes(gate_s=0, lock_s=settings.lock_timeout / 1000, checkpoint_s=settings.checkpoint_deadline / 1000)
    swaps = Swaps(backend.monitor, worker, times)
    swaps.connect(roots=lambda: [one.kernel.identity for one in found if one.kernel.identity is not None])
    rescuer = _Rescuer(swaps, settings, backend, files)
    try:
        async with asyncio.timeout(_ORPHAN_PATIENCE_S):
            await worker.wait_for_previous_worker()
        done: list[Rescued] = []
        for one in found:
            if (rescued := await rescuer.rescue(one)) is not None:
                done.append(rescued)
                if ledger is not None and rescued.outcome != "running":
                    ledger.record(one.kernel.lease_id, wall_ms(), f"rescue.{rescued.outcome}", rescued.sentence)
    except TimeoutError:
        raise ConflictError(
            f"the previous broker's checkpoint worker ({turn.holder()}) is still running; try again when it has ended"
        ) from None
    else:
        return done
    finally:
        await worker.close()
        turn.close()


@dataclass(frozen=True, slots=True)
class _Rescuer:
    swaps: Swaps
    settings: Settings
    backend: Backend
    files: Path
    written: set[str] = field(default_factory=set)  # leases
    without_memory: Counter[int] = field(default_factory=Counter)  # by user

    async def rescue(self, one: _FoundKernel) -> Rescued | None:
        """Bring one kernel back, and write its record if it was lost. Return None if its process has ended.

        Raises GPUError or OSError.
        """
        kernel = one.kernel
        truth = await self.swaps.truth(kernel, one.device_id, one.saved_mib or 0)
        if truth is None:
            outcome, sentence = "unknown", "the driver does not report its state; try again in a moment"
        elif truth.state is LeaseState.UNATTACHED:
            return None
        elif truth.state is LeaseState.QUARANTINED:
            outcome, sentence = "failed", truth.sentence
        elif truth.state is LeaseState.SUSPENDED:
            outcome, sentence = await self.bring_back(one)
        else:
            outcome, sentence = "running", "it was not suspended"
        if one.carrier is not None and await self._write_record(one.carrier, kernel, outcome):
            outcome = "saved"
            sentence = f"{sentence}; its lost record was rewritten; its next cell brings it back"
        return Rescued(
            lease_id=kernel.lease_id,
            label=one.label,
            pid=kernel.identity.pid if kernel.identity is not None else None,
            outcome=outcome,
            saved_mib=one.saved_mib,
            sentence=sentence,
        )

    async def bring_back(self, one: _FoundKernel) -> tuple[str, str]:
        monitor, devices = self.backend.monitor, self.backend.devices
        device_id = one.device_id
        # If the device is unknown, use the only device, or any device if all are empty. The kernel finds its own.
        if device_id is None and (
            len(devices) == 1 or not any(monitor.use(one.device_id).processes for one in devices)
        ):
            device_id = devices[0].device_id
        if device_id is None:
            return (
                "no-room",
                "its device is unknown, so all devices must be empty: shut down other kernels and try again",
            )
        if not one.saved_mib and monitor.use(device_id).processes:
            return (
                "no-room",
                "its size is unknown, so its device must be empty: shut down other kernels and try again",
            )
        effect = Resume(
            lease_id=one.kernel.lease_id,
            operation_id=0,
            generation=0,
            device_ids=(device_id,),
            from_device_ids=(one.device_id,) if one.device_id is not None else (),
            reserve_mib=one.saved_mib or 0,
        )
        outcome, sentence = await self.swaps.resume(one.kernel, effect, one.saved_mib or 0)
        match outcome:
            case ResumeOutcome.RESTORED:
                size = format_memory(one.saved_mib) if one.saved_mib else "its memory"
                return "restored", f"{size} is on the device again"
            case ResumeOutcome.NOT_STARTED:
                return "no-room", sentence
            case ResumeOutcome.UNKNOWN:
                return "failed", sentence

    async def _write_record(self, one: Carrier, kernel: Kernel, outcome: str) -> bool:
        command = command_of(one)
        is_saved = outcome not in ("restored", "running")
        if not (command.is_kernel or is_saved):
            return False  # a program that a kernel left behind
        host = await self.swaps.inspector.take()
        pids = {identity.pid for identity in self.swaps.inspector.tree(kernel, host)}
        used_mib = sum(host.used_mib(pid) for pid in pids)
        where = host.homes(pids) or (tuple(host.uses) if len(host.uses) == 1 else ())
        specs = {spec.device_id: spec for spec in device_specs(self.settings, self.backend)}
        pools = {pool.name: pool for pool in self.settings.pool_specs(list(specs.values()))}
        own = next((pool for pool in pools.values() if where and where[0] in pool.devices), None)
        pool = own or pools.get("default") or pools[min(pools)]
        if is_saved or len(where) > 1:
            milli, reserve_mib = 1000, max(spec.leasable_mib for spec in specs.values())
        else:
            whole_mib = min(specs[device_id].leasable_mib for device_id in pool.devices)
            least_mib = used_mib or whole_mib * _DEFAULT_MILLI // 1000
            milli = next((size for size in sorted(pool.fractions_milli) if whole_mib * size // 1000 >= least_mib), 1000)
            reserve_mib = max(whole_mib * milli // 1000, used_mib)
        state = LeaseState.SUSPENDED if is_saved else LeaseState.RESIDENT if used_mib else LeaseState.NO_CONTEXT
        if state is LeaseState.NO_CONTEXT:
            # If two processes belong to one lease, prefer the one with memory, and then the older one.
            self.without_memory[account_uid(one.uid)] += 1
            if one.lease_id in self.written or self.without_memory[account_uid(one.uid)] > MAX_LEASES_PER_UID:
                return False
        self.written.add(one.lease_id)
        runs, served = is_command(command.connection)
        record = LeaseRecord(
            spec=LeaseSpec(
                lease_id=one.lease_id,
                pool=pool.name,
                owner=account_name(one.uid),
                uid=one.uid,
                fraction_milli=milli,
                reserve_mib=reserve_mib,
                request_mib=reserve_mib if pool.reserve_by is ReserveBy.USE else None,
                devices=max(1, len(where)),
                group=user_group(one.uid, pool),
                gated=command.gated,
                label=command.label,
            ),
            state=state,
            generation=0,
            device_ids=where,
            saved_mib=0,  # unknown
            uid=one.uid,
            token_sha256="",  # unknown, until the kernel's own process tells the broker
            connection=command.connection,
            created_ms=wall_ms(),
            launch=Launch(
                language="python" if command.ipykernel else "",
                ipykernel=command.ipykernel,
                had_process=True,
                command=runs,
                served=served,
            ),
            facts=KernelFacts(kernel_id=command.kernel_id),
            identity=one.identity,
            home_ids=where,
        )
        write_lease_file(self.files, record)
        return outcome == "no-room"
