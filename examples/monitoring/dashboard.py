"""The Grafana dashboard, written as JSON: `python examples/monitoring/dashboard.py` writes `dashboard.json` beside this file.

It has the form of the JupyterHub project's dashboards (github.com/jupyterhub/grafana-dashboards): a data source as the variable
PROMETHEUS_DS, the hub as a variable with `.*` for all, rows of panels with a unit and a description each.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("dashboard.json")
_SOURCE = {"type": "prometheus", "uid": "$PROMETHEUS_DS"}
_HOST = 'hub=~"$hub", instance=~"$instance"'
_POOL = f'{_HOST}, pool=~"$pool"'
_GRID = 24  # columns of Grafana's grid


def pool(metric: str, more: str = "") -> str:
    """Return a selector of one of our metrics that has a pool."""
    return f"jupyter_gpu_{metric}{{{_POOL}{more}}}"


def host(metric: str, more: str = "") -> str:
    """Return a selector of one of our metrics of the host."""
    return f"jupyter_gpu_{metric}{{{_HOST}{more}}}"


def process(metric: str) -> str:
    """Return a selector of a metric of the broker's own process."""
    return f'{metric}{{job="jupyter-gpu", {_HOST}}}'


def rate(selector: str) -> str:
    """Return what a counter grows by in a second."""
    return f"rate({selector}[$__rate_interval])"


def total(selector: str) -> str:
    """Return what a counter has grown by in the time that is shown."""
    return f"increase({selector}[$__range])"


@dataclass(frozen=True)
class Query:
    """An expression, what its series are called, and whether its last value alone is asked for."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel of `width` columns of 24. `kind`: Grafana's type; `unit`: Grafana's name of it; `steps`: values with their colours."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    steps: Sequence[tuple[float | None, str]] = ()
    highest: float | None = None
    name: bool = False  # show the series' name, not its value


def quantiles(metric: str, by: str) -> list[Query]:
    """Return the 50th, 95th and 99th percentile of a histogram with a pool."""
    return [
        Query(f"histogram_quantile({share}, sum by (le, {by}) ({rate(pool(metric + '_bucket'))}))", f"p{share * 100:.0f} {{{{{by}}}}}")
        for share in (0.5, 0.95, 0.99)
    ]


def late(metric: str) -> Query:
    """Return the 99th percentile of one of the broker's own histograms."""
    return Query(f"histogram_quantile(0.99, sum by (le, instance) ({rate(host(metric + '_bucket'))}))", "{{instance}}")


_ALARM = ((None, "green"), (1, "red"))
_CLUSTER = [
    Panel("Brokers", "Which version serves how many hosts, and whether their devices are simulated.", "none",
          [Query(f"count by (version, simulated) ({host('build_info')})", "{{version}}, simulated: {{simulated}}", instant=True)],
          kind="stat", width=6, name=True),
    Panel("GPUs", "Devices of these pools.", "none",
          [Query(f"count({pool('device_info')})", instant=True)], kind="stat", width=4),
    Panel("GPUs in use now", "Devices on which kernels have room, as a mean over the last scrapes.", "short",
          [Query(f"sum({rate(pool('occupied_device_seconds_total'))})", instant=True)], kind="stat", width=4),
    Panel("Kernels that wait", "Kernels that wait for a GPU now.", "none",
          [Query(f"sum({pool('queue_length')})", instant=True)], kind="stat", width=4, steps=((None, "green"), (1, "yellow"), (10, "red"))),
    Panel("Saved GPU time", "GPU time that suspended kernels left to others in the time shown, by their shares.", "s",
          [Query(f"sum({total(pool('suspended_gpu_seconds_total'))})", instant=True)], kind="stat", width=6),
    Panel("GPUs in use",
          "By the shares of kernels: reserved as long as a kernel lives, held while it has room on a device, busy while it runs a cell. "
          "In use: devices with a kernel. Reserved above the devices that there are is what suspending kernels wins.", "short",
          [Query(f"count({pool('device_info')})", "devices"),
           Query(f"sum({rate(pool('occupied_device_seconds_total'))})", "in use"),
           Query(f"sum({rate(pool('reserved_gpu_seconds_total'))})", "reserved"),
           Query(f"sum({rate(pool('held_gpu_seconds_total'))})", "held"),
           Query(f"sum({rate(pool('busy_gpu_seconds_total'))})", "busy")]),
    Panel("Waits for a GPU", "From the wish for a GPU to the grant, by pool. A wait that takes no time counts, too.", "s",
          quantiles("wait_seconds", "pool")),
    Panel("Queue", "Kernels that wait, and how long the one has waited that has waited longest.", "short",
          [Query(f"sum by (pool) ({pool('queue_length')})", "waiting, {{pool}}"),
           Query(f"max by (pool) ({pool('queue_longest_wait_seconds')})", "longest wait in seconds, {{pool}}")]),
    Panel("Kernels by state", "Resident kernels have room on a GPU; suspended ones lie in host memory.", "none",
          [Query(f"sum by (state) ({pool('leases')})", "{{state}}")], stacked=True),
    Panel("Waits above the target", "Share of waits longer than the pool's wait_target, and the share that its wait_bound allows.", "percentunit",
          [Query(f"sum by (pool) ({rate(pool('waits_over_target_total'))}) / sum by (pool) ({rate(pool('wait_seconds_count'))})", "{{pool}}"),
           Query(f"max by (pool) ({pool('pool_wait_bound_ratio')})", "allowed, {{pool}}")]),
    Panel("Device memory", "Reserved by kernels, used by them, used by programs of no kernel, and what kernels may have together.", "bytes",
          [Query(f"sum({pool('device_reserved_bytes')})", "reserved"),
           Query(f"sum({pool('device_resident_bytes')})", "in use"),
           Query(f"sum({pool('device_stranger_bytes')})", "of no kernel"),
           Query(f"sum({pool('device_leasable_bytes')})", "there is")]),
    Panel("Swaps", "Device memory that suspends, resumes and moves copied.", "Bps",
          [Query(f"sum by (kind) ({rate(host('swap_bytes_total'))})", "{{kind}}")]),
    Panel("Duration of swaps", "99th percentile of suspends, resumes and moves.", "s",
          [Query(f"histogram_quantile(0.99, sum by (le, kind) ({rate(host('swap_seconds_bucket'))}))", "{{kind}}")]),
    Panel("Compute that is asked for", "What the busy kernels of a device need of it together. Above 100 % they slow each other down.", "percentunit",
          [Query(f"max by (instance, device) ({pool('device_demand_ratio')})", "{{instance}} {{device}}")]),
]  # fmt: skip
_NAMED = " Needs c.GPUBroker.metrics_users."
_USERS = [
    Panel("GPU time by pool", "Time for which kernels held room, by their shares, in the time shown.", "s",
          [Query(f"sum by (pool) ({total(pool('held_gpu_seconds_total'))})", "{{pool}}", instant=True)], kind="bargauge"),
    Panel("Of it busy", "Share of the held GPU time in which cells ran. A low share says that kernels could leave earlier (idle_after).", "percentunit",
          [Query(f"sum by (pool) ({rate(pool('busy_gpu_seconds_total'))}) / sum by (pool) ({rate(pool('held_gpu_seconds_total'))} > 0)", "{{pool}}")],
          highest=1),
    Panel("Servers with a seat", "Seats of hub servers, and servers that wait for one.", "none",
          [Query(f"sum by (pool) ({pool('seats')})", "seats, {{pool}}"),
           Query(f"sum by (pool) ({pool('seats_waiting')})", "waiting, {{pool}}")]),
    Panel("GPU time by user", "The 20 users whose kernels held most, by their shares, in the time shown." + _NAMED, "s",
          [Query(f"topk(20, sum by (user, account) ({total(pool('user_held_gpu_seconds_total'))}))", "{{user}} ({{account}})", instant=True)],
          kind="bargauge", width=12),
    Panel("Busy GPUs by user", "GPUs on which users' cells run, by their shares." + _NAMED, "short",
          [Query(f"topk(20, sum by (user, account) ({rate(pool('user_busy_gpu_seconds_total'))}))", "{{user}} ({{account}})")],
          width=12, stacked=True),
]  # fmt: skip
_COST = [
    Panel("Power", "What the devices draw, by pool.", "watt",
          [Query(f"sum by (pool) ({rate(pool('energy_joules_total'))})", "{{pool}}")]),
    Panel("Energy", "Drawn by kernels, with their part of the idle draw, and by devices that no kernel held, in the time shown.", "joule",
          [Query(f"sum({total(pool('lease_energy_joules_total'))})", "kernels", instant=True),
           Query(f"sum({total(pool('energy_joules_total'))}) - sum({total(pool('lease_energy_joules_total'))})", "nobody", instant=True)],
          kind="bargauge"),
    Panel("Energy by user", "The 20 users whose kernels drew most in the time shown." + _NAMED, "joule",
          [Query(f"topk(20, sum by (user, account) ({total(pool('user_lease_energy_joules_total'))}))", "{{user}} ({{account}})", instant=True)],
          kind="bargauge"),
    Panel("Charged", "What kernels are charged in the time shown, in units of the currency. Pools without a price are not here.", "short",
          [Query(f"sum by (pool, currency) ({total(pool('charged_amount_total'))})", "{{pool}}, {{currency}}", instant=True)],
          kind="bargauge"),
    Panel("Saved by suspending", "What kernels would be charged more if none had been suspended in the time shown.", "short",
          [Query(f"sum by (pool, currency) ({total(pool('resident_amount_total'))}) - sum by (pool, currency) ({total(pool('charged_amount_total'))})",
                 "{{pool}}, {{currency}}", instant=True)],
          kind="bargauge"),
    Panel("Charged by user", "The 20 users who are charged most in the time shown, in units of the currency." + _NAMED, "short",
          [Query(f"topk(20, sum by (user, account, currency) ({total(pool('user_charged_amount_total'))}))",
                 "{{user}} ({{account}}), {{currency}}", instant=True)],
          kind="bargauge"),
]  # fmt: skip
_IN_DOUBT = ', state="quarantined"'
_HEALTH = [
    Panel("Brokers that answer", "1 while Prometheus reaches the broker.", "none",
          [Query(process("up"), "{{instance}}")], highest=1, width=6),
    Panel("Kernels in doubt", "Kernels whose GPU memory is in an unknown state: jupyter gpu explain says more.", "none",
          [Query(f"sum({pool('leases', _IN_DOUBT)})", "now", instant=True),
           Query(f"sum({total(pool('quarantines_total'))})", "in the time shown", instant=True)], kind="stat", width=6, steps=_ALARM),
    Panel("Devices in trouble", "Devices that do not answer, that are over-committed, and that are being emptied.", "none",
          [Query(f"sum({pool('device_lost')})", "lost", instant=True),
           Query(f"sum({pool('device_over_committed')})", "over-committed", instant=True),
           Query(f"sum({pool('device_draining')})", "draining", instant=True)], kind="stat", width=6, steps=_ALARM),
    Panel("Ledgers in trouble", "Brokers that cannot write their ledger: no kernel gets a GPU there.", "none",
          [Query(f"sum({host('ledger_trouble')})", instant=True)], kind="stat", width=6, steps=_ALARM),
    Panel("Swaps that came to something else", "By what was done and what came of it. nothing-to-save, aborted and refused are no faults.", "none",
          [Query(f"sum by (kind, outcome) (increase({host('swap_failures_total')}[$__rate_interval]))", "{{kind}}: {{outcome}}")]),
    Panel("Refused leases", "Kernels that got no lease, by the reason.", "none",
          [Query(f"sum by (reason) (increase({host('leases_refused_total')}[$__rate_interval]))", "{{reason}}")]),
    Panel("Ended leases and caps", "Kernels that ended, by the reason, and kernels over their memory cap, by what was done.", "none",
          [Query(f"sum by (reason) (increase({host('leases_ended_total')}[$__rate_interval]))", "ended: {{reason}}"),
           Query(f"sum by (action) (increase({host('cap_breaches_total')}[$__rate_interval]))", "over its cap: {{action}}")]),
    Panel("Host memory for suspended kernels", "What suspended kernels take, with suspends under way, and what they may take together.", "bytes",
          [Query(f"sum({host('host_saved_bytes')}) + sum({host('host_reserved_bytes')})", "taken"),
           Query(f"sum({host('host_budget_bytes')})", "allowed")]),
    Panel("Cells that wait too long", "Waiting kernels beyond what the turns of their pool explain.", "none",
          [Query(f"sum by (pool) ({pool('queue_over_bound')})", "{{pool}}")]),
    Panel("Forecasts", "Share of forecasts that held; 80 % is what they promise.", "percentunit",
          [Query(f"avg by (what) ({host('forecast_covered_ratio')})", "{{what}}")], highest=1),
    Panel("Writes of the ledger", "99th percentile of transactions, with the wait for the disk.", "s", [late("ledger_write_seconds")]),
    Panel("Lag of the broker", "99th percentile of how late the broker's event loop is.", "s", [late("loop_lag_seconds")]),
    Panel("The broker's process", "Its memory.", "bytes", [Query(process("process_resident_memory_bytes"), "{{instance}}")], width=4),
    Panel("Restarts", "Of brokers, in the time shown.", "none",
          [Query(f"sum(changes({process('process_start_time_seconds')}[$__range]))", instant=True)], kind="stat", width=4),
]  # fmt: skip
ROWS = {"Cluster": _CLUSTER, "Users and pools": _USERS, "Energy and cost": _COST, "Health": _HEALTH}


def _variable(name: str, label: str, description: str, metric: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "description": description,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${PROMETHEUS_DS}"},
        "query": f"label_values({metric}, {name})",
        "refresh": 2,  # whenever the time that is shown changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


_VARIABLES = [
    {"name": "PROMETHEUS_DS", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0},
    _variable("hub", "Hub", "The label `hub` of the scrape configuration, for those who have several", "jupyter_gpu_build_info"),
    _variable("instance", "Host", "The hosts whose brokers are shown", "jupyter_gpu_build_info"),
    _variable("pool", "Pool", "The pools that are shown", "jupyter_gpu_queue_length"),
]


def _target(query: Query, ref: str) -> dict[str, Any]:
    return {
        "refId": ref,
        "datasource": _SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": query.instant,
        "range": not query.instant,
    }


def _shape(panel: Panel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the panel's options and its custom field settings, by its kind."""
    if panel.kind == "timeseries":
        custom: dict[str, Any] = {"fillOpacity": 10, "lineInterpolation": "stepAfter", "showPoints": "never"}
        if panel.stacked:
            custom["stacking"] = {"mode": "normal"}
        return {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}}, custom
    reduced: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "bargauge":
        return {**reduced, "orientation": "horizontal", "displayMode": "basic"}, {}
    return {**reduced, "colorMode": "value", "textMode": "value_and_name" if panel.name or len(panel.queries) > 1 else "value"}, {}


def _panel(panel: Panel, number: int, x: int, y: int, height: int) -> dict[str, Any]:
    options, custom = _shape(panel)
    steps = [{"value": value, "color": color} for value, color in panel.steps or ((None, "green"),)]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.highest is not None:
        defaults["max"] = panel.highest
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "targets": [_target(query, chr(ord("A") + index)) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def _panels() -> list[dict[str, Any]]:
    """Return the rows and their panels, from left to right and from the top down."""
    numbers, y, made = count(1), 0, list[dict[str, Any]]()
    for title, panels in ROWS.items():
        made.append({"id": next(numbers), "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": y, "w": _GRID, "h": 1}})
        y, x, height = y + 1, 0, 0
        for panel in panels:
            if x + panel.width > _GRID:
                y, x, height = y + height, 0, 0
            tall = 4 if panel.kind == "stat" else 8
            made.append(_panel(panel, next(numbers), x, y, tall))
            x, height = x + panel.width, max(height, tall)
        y += height
    return made


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "jupyter-fractional-gpu",
        "title": "Fractional GPUs for Jupyter",
        "description": "What notebooks use of GPUs, how long they wait, what it costs, and how the brokers are.",
        "tags": ["jupyterhub", "gpu"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _VARIABLES},
        "annotations": {"list": []},
        "links": [],
        "panels": _panels(),
    }


def text() -> str:
    """Return the dashboard's file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
    sys.stdout.write(f"wrote {TARGET}\n")
