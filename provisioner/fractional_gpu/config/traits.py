"""The settings of a broker as traitlets: their names, defaults, help and examples. Their meaning is checked in `settings`."""

from typing import Any

from traitlets import Bool, Dict, Float, Int, List, Unicode, Union
from traitlets.config import Configurable

__all__ = ["GPUBroker"]


def _text_or_number(default: str | int | None, **keywords: Any) -> Union:  # noqa: ANN401 -- traitlets' own keywords
    return Union([Unicode(), Int()], default_value=default, **keywords)


class GPUBroker(Configurable):
    """What a person may set in `jupyter_gpu_config.py` as `c.GPUBroker.<name>`."""

    state_dir = Unicode(
        "",
        help="""Where the ledger is kept: an absolute path on a local disk, private to the broker.
        Empty: /var/lib/jupyter-gpu for a system service, else a folder for each host and socket in the user's state folder
        (~/.local/state/jupyter-gpu), or in /var/tmp/jupyter-gpu-UID where that is on a network filesystem.""",
    ).tag(config=True, example="/var/lib/jupyter-gpu")
    idle_exit = _text_or_number(
        "10m",
        help="""A broker that nobody asked anything for so long, and that has no leases, stops itself; 'never': it stays.
        One that was started as a service should stay.""",
    ).tag(config=True, example="never")
    hang_limit = _text_or_number(
        "30s",
        help="""A broker whose event loop stands still for so long writes what its threads do into its log and ends itself; it is
        started again where it is needed, and no kernel loses anything. 'never': it stays.""",
    ).tag(config=True, example="1m")
    host_memory = _text_or_number(
        "50%",
        help="""The host memory that the state of suspended kernels may take in all: a share of the machine's memory, or a
        size. 0: no kernel is suspended.""",
    ).tag(config=True, example="64GiB")
    device_overhead = Union(
        [Unicode(), Int()],
        allow_none=True,
        default_value=None,
        help="""The memory of each device that no lease may have, for the driver and as a margin that a restore leaves
        free (it is fatal to a process if the device runs out of memory). None: 300MiB and 2 % of the device (256MiB at least)
        on real devices, nothing on simulated ones.""",
    ).tag(config=True, example="500MiB")
    lock_timeout = _text_or_number(
        "2s",
        help="""When a kernel is to be suspended, how long its GPU work may take to drain before it is left alone.""",
    ).tag(config=True, example="5s")
    gate_timeout = _text_or_number(
        "2s",
        help="""When a kernel is to be suspended, how long its extension may take to answer before it is left alone.""",
    ).tag(config=True, example="5s")
    checkpoint_deadline = _text_or_number(
        "10m",
        help="""How long one checkpoint or restore may take before the process that does it counts as hung.""",
    ).tag(config=True, example="20m")
    default_pool = Unicode(
        "",
        help="""The pool of kernels that name none. Empty: the pool called 'default', or the only pool there is.""",
    ).tag(config=True, example="default")
    default_fraction = Union(
        [Unicode(), Float(), Int()],
        allow_none=True,
        default_value=None,
        help="""The fraction of kernels that name none. None: 1/4 where the default pool offers it, else the smallest that
        it offers.""",
    ).tag(config=True, example="1/2")
    log_level = Unicode(
        "INFO",
        help="""How much is written to the log: DEBUG, INFO, WARNING or ERROR.""",
    ).tag(config=True, example="DEBUG")
    devices = Union(
        [Unicode(), List()],
        default_value="all",
        help="""The devices that this broker manages: 'all', or a list of numbers, UUIDs or beginnings of UUIDs. Others are
        left alone.""",
    ).tag(config=True, example=[0, 1])
    admin_group = Unicode(
        "",
        help="""A group of the system whose members may see and steer everybody's kernels and empty devices, as root and the
        broker's own user may. Empty: nobody else.""",
    ).tag(config=True, example="gpu-admins")
    seats_required = Bool(
        default_value=False,
        help="""Refuse every kernel that has no seat from a hub, whoever asks. Set by the hub that runs the broker.""",
    ).tag(config=True, example=True)
    audit_file = Unicode(
        "",
        help="""The audit log of what administrators do: an absolute path. Empty: audit.jsonl where the ledger is.""",
    ).tag(config=True, example="/var/log/jupyter-gpu/audit.jsonl")
    audit_max_size = _text_or_number(
        "10MiB",
        help="""How large one file of the audit log may become before the next one is begun.""",
    ).tag(config=True, example="100MiB")
    audit_files = Int(
        20,
        help="""How many finished files of the audit log are kept.""",
    ).tag(config=True, example=100)
    audit_keep = _text_or_number(
        "365d",
        help="""How long the audit log is kept, or 'forever'. It is dropped by files, which end after a quarter of this: a
        line may stay a quarter longer.""",
    ).tag(config=True, example="90d")
    audit_required = Bool(
        default_value=True,
        help="""Refuse what an administrator asks while the audit log cannot be written (a full disk). False: it is done, and
        the broker's log has a line for each act that is missing.""",
    ).tag(config=True, example=False)
    metrics_address = Unicode(
        "",
        help="""Where Prometheus finds the metrics by TCP: an IP address and a port. Empty: nowhere; the socket has them in any
        case. Whoever reaches the address reads the totals.""",
    ).tag(config=True, example="127.0.0.1:9464")
    metrics_public = Bool(
        default_value=False,
        help="""Let metrics_address be one that other machines reach. Without it, only a loopback address is allowed.""",
    ).tag(config=True, example=True)
    pools: "Dict[str, Any]" = Dict(  # traitlets' Dict is generic for type checkers only
        key_trait=Unicode(),
        default_value={"default": {}},
        help="""The pools: devices with one policy. A key that is not given has its default.""",
    ).tag(config=True, example=None)
