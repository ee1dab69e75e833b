"""The settings of a broker as traitlets: names, defaults, help and examples. `settings` checks and translates the values."""

from typing import Any

from traitlets import Bool, Dict, Float, Int, List, Unicode, Union
from traitlets.config import Configurable


def _text_or_number(default: str | int | None, **keywords: Any) -> Union:  # noqa: ANN401 -- traitlets' own keywords
    return Union([Unicode(), Int()], default_value=default, **keywords)


class GPUBroker(Configurable):
    """The settings in `jupyter_gpu_config.py`, each as `c.GPUBroker.<name>`."""

    state_dir = Unicode(
        "",
        help="""The folder of the ledger, the broker's database: an absolute path on a local disk, private to the broker.
        Empty: /var/lib/jupyter-gpu for a system service; else a folder for each host and socket in the user's state folder
        (~/.local/state/jupyter-gpu), or in /var/tmp/jupyter-gpu-UID if that one is on a network filesystem.""",
    ).tag(config=True, example="/var/lib/jupyter-gpu")
    ledger_limit = _text_or_number(
        "4GiB",
        help="""The size that the ledger may have on its disk, such as '16GiB'. A larger one loses its oldest history before its time (90
        days), and what leases used (kept for 400 days) only when no history is left. What kernels need is always written.""",
    ).tag(config=True, example="16GiB")
    idle_exit = _text_or_number(
        "10m",
        help="""The broker stops itself when it has had no request and no lease for this long, such as '30m'. 'never': it does not
        stop; use this for a broker that runs as a service.""",
    ).tag(config=True, example="never")
    hang_limit = _text_or_number(
        "30s",
        help="""A broker whose event loop hangs for this long writes the stacks of its threads to its log and ends itself. The next
        program that needs it starts it again, and no kernel loses its state. 'never': it does not end itself.""",
    ).tag(config=True, example="1m")
    host_memory = _text_or_number(
        "50%",
        help="""The host memory that all suspended kernels together may use for their GPU state: a share of the machine's memory, such
        as '50%', or a size, such as '64GiB'. 0: no kernel is suspended.""",
    ).tag(config=True, example="64GiB")
    device_overhead = Union(
        [Unicode(), Int()],
        allow_none=True,
        default_value=None,
        help="""The memory of each device that no kernel may reserve: it is for the driver, and it is the margin that a restore leaves
        free (a restore on a full device kills the process). None: on real devices 300MiB plus 2 % of the device (at least 256MiB),
        on simulated ones nothing.""",
    ).tag(config=True, example="500MiB")
    lock_timeout = _text_or_number(
        "2s",
        help="""How long the GPU work of a kernel that is being suspended may take to finish. After this time the kernel is not
        suspended and stays on its device.""",
    ).tag(config=True, example="5s")
    gate_timeout = _text_or_number(
        "2s",
        help="""How long the extension of a kernel that is being suspended may take to answer, or to come back after a start of the
        broker. After this time the kernel is suspended only if it has not worked on its device for a while, or is preempted.""",
    ).tag(config=True, example="5s")
    checkpoint_deadline = _text_or_number(
        "10m",
        help="""How long one checkpoint or one restore may take. After this time the checkpoint worker counts as hung.""",
    ).tag(config=True, example="20m")
    default_pool = Unicode(
        "",
        help="""The pool of kernels that name no pool. Empty: the pool called 'default', or the only pool.""",
    ).tag(config=True, example="default")
    default_fraction = Union(
        [Unicode(), Float(), Int()],
        allow_none=True,
        default_value=None,
        help="""The fraction of a GPU for kernels that name none, such as '1/2', 0.5 or '500m'. None: 1/4 if the default pool offers it,
        else its smallest fraction.""",
    ).tag(config=True, example="1/2")
    log_level = Unicode(
        "INFO",
        help="""The least severe level that is written to the log: DEBUG, INFO, WARNING or ERROR.""",
    ).tag(config=True, example="DEBUG")
    devices = Union(
        [Unicode(), List()],
        default_value="all",
        help="""The devices that this broker manages: 'all', or a list of numbers, UUIDs or beginnings of UUIDs. It does not touch
        other devices.""",
    ).tag(config=True, example=[0, 1])
    device_kind = Unicode(
        "",
        help="""The kind of device that this broker manages. Empty: NVIDIA's GPUs. Else a kind that an installed package offers
        (docs/extending.md).""",
    ).tag(config=True, example="example")
    admin_group = Unicode(
        "",
        help="""A group of the operating system whose members are administrators, like root and the broker's own user: they may see and
        control all users' kernels and drain devices. Empty: no group.""",
    ).tag(config=True, example="gpu-admins")
    account_of_unknown_uids = Unicode(
        "",
        help="""A user of this machine for whom uids without a passwd entry count, all together, in limits, shares and budgets. Subordinate
        uids count for their owner by /etc/subuid instead. Name a user with which no person works: it sees what is charged to it. Empty:
        each of these uids is a separate user.""",
    ).tag(config=True, example="nobody")
    seats_required = Bool(
        default_value=False,
        help="""Refuse every kernel without a seat from a hub, whatever its user. A hub that runs the broker sets this.""",
    ).tag(config=True, example=True)
    audit_file = Unicode(
        "",
        help="""The file of the audit log, which records administrators' actions: an absolute path. Empty: audit.jsonl in the ledger's
        folder.""",
    ).tag(config=True, example="/var/log/jupyter-gpu/audit.jsonl")
    audit_max_size = _text_or_number(
        "10MiB",
        help="""The largest size of one file of the audit log; the next entry begins a new file.""",
    ).tag(config=True, example="100MiB")
    audit_files = Int(
        20,
        help="""The number of finished files of the audit log to keep; older ones are removed.""",
    ).tag(config=True, example=100)
    audit_keep = _text_or_number(
        "365d",
        help="""How long entries of the audit log are kept, such as '90d', or 'forever'. Whole files are removed, and a file covers up to
        a quarter of this time: an entry may stay a quarter longer.""",
    ).tag(config=True, example="90d")
    audit_required = Bool(
        default_value=True,
        help="""Refuse administrators' actions while the audit log cannot be written, such as on a full disk. False: execute them, and
        write the missing entries to the broker's log.""",
    ).tag(config=True, example=False)
    on_empty = Unicode(
        "",
        help="""A program that is called with 'empty' and a device's UUID when nothing has been on the device for empty_after, and with
        'used' when something is again: an absolute path. It runs as the broker's user, at most 30 s, and the broker waits for nothing.
        Pools empty whole devices with empty_devices. Empty: none.""",
    ).tag(config=True, example="/usr/local/sbin/gpu-power")
    empty_after = _text_or_number(
        "5m",
        help="""How long nothing must have been on a device before on_empty is called.""",
    ).tag(config=True, example="30m")
    revocation_notice = Unicode(
        "",
        help="""Where a notice appears that this host goes away: the absolute path of a file, or a URL on 169.254.169.254, the address of
        clouds' metadata services (AWS: http://169.254.169.254/latest/meta-data/spot/instance-action; Google:
        http://169.254.169.254/computeMetadata/v1/instance/preempted). It is read every 2 s. When there is a notice, every user is told to
        save to disk; when it disappears, that it was withdrawn. Empty: nothing is read.""",
    ).tag(config=True, example="/run/revoked")
    revocation_drains = Bool(
        default_value=False,
        help="""With revocation_notice: also suspend what can be suspended by the deadline, as `jupyter gpu drain --all --deadline`
        does. For hosts whose memory is saved when they go away (hibernation, snapshots). Elsewhere a suspended kernel is lost with the
        host, and cannot write to a disk any more, while one on its GPU can.""",
    ).tag(config=True, example=True)
    revocation_deadline = _text_or_number(
        "30s",
        help="""How long after a notice that names no time the host is expected to go away.""",
    ).tag(config=True, example="2m")
    metrics_address = Unicode(
        "",
        help="""An IP address and a port at which Prometheus can read the metrics. Empty: none; the broker's socket always has them.
        Every program that reaches the address can read the totals.""",
    ).tag(config=True, example="127.0.0.1:9464")
    metrics_public = Bool(
        default_value=False,
        help="""Allow a metrics_address that other machines can reach. False: only a loopback address such as 127.0.0.1 is allowed.""",
    ).tag(config=True, example=True)
    budgets: "List[Any]" = List(
        default_value=[],
        help="""How much users and groups may use: a list of {'user' or 'group': a name, or '*' for each one, 'limit': an amount such as
        '40 GPU hours', '100 EUR' or '12 kWh', 'per': 'day', 'week' or 'month' of the calendar, 'hour' (the last 60 minutes), or
        'rolling 30d', and 'pools': those that count (all, if left out)}. What follows when one is used up: the pool's over_budget.""",
    ).tag(config=True, example=[{"user": "*", "limit": "40 GPU hours", "per": "month"}])
    metrics_users = Bool(
        default_value=False,
        help="""Also count what each user uses and is charged. Users' names are personal data: every program that reaches metrics_address
        can read them. On the broker's socket only administrators can. In each pool 256 users are named, the others are one sum.""",
    ).tag(config=True, example=True)
    carbon: "Union" = Union(
        [Unicode(), Float()],
        default_value=None,
        allow_none=True,
        help="""How much carbon dioxide the GPUs' energy stands for, for reports: grams for each kWh, or the path of a CSV file with the
        columns time and g_per_kwh and a line for each hour. None: reports show no carbon. Nothing is fetched from a network.""",
    ).tag(config=True, example=350)
    usage_visible = Unicode(
        "own",
        help="""Whose use and costs users may see: 'own'; 'group': also the sums of each user of their group; 'all': of every user.
        Notebooks' names are shown to their own users and to administrators only.""",
    ).tag(config=True, example="group")
    pools: "Dict[str, Any]" = Dict(  # traitlets' Dict is generic for type checkers only
        key_trait=Unicode(),
        default_value={"default": {}},
        help="""The pools: groups of devices with one policy. A key that is left out has its default.""",
    ).tag(config=True, example=None)
