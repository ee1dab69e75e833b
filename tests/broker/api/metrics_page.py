"""The tables of docs/metrics.md, generated from the code: `python -m tests.broker.api.metrics_page`."""

from collections.abc import Iterable

from fractional_gpu.broker.accounting.counters import POOL_METRICS, USER_METRICS
from fractional_gpu.broker.api.metrics_routes import BOOK_METRICS
from fractional_gpu.broker.metrics import COUNTED, PREFIX, Metric
from fractional_gpu_hub.seats import SEAT_WAIT, SPAWNS
from tests.support.paths import ROOT

__all__ = ["PAGE", "names", "written"]

PAGE = ROOT / "docs" / "metrics.md"
_TABLES = {
    "broker": (*COUNTED, *BOOK_METRICS),
    "usage": POOL_METRICS,
    "users": USER_METRICS,
    "hub": tuple(
        Metric(one._type, one._name.removeprefix(PREFIX), one._documentation, one._labelnames)
        for one in (SPAWNS, SEAT_WAIT)
    ),
}


def _table(metrics: Iterable[Metric]) -> str:
    lines = ["| metric, without `jupyter_gpu_` | meaning (kind, labels) |", "|---|---|"]
    for metric in metrics:
        labels = ", ".join([metric.kind, *(f"`{label}`" for label in metric.labels)])
        lines.append(f"| `{_name(metric)}` | {metric.help} ({labels}) |")
    return "\n".join(lines) + "\n"


def _name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def names() -> set[str]:
    """Return every name under which a metric can be queried."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {
        f"{PREFIX}{metric.name}{suffix}"
        for metrics in _TABLES.values()
        for metric in metrics
        for suffix in suffixes[metric.kind]
    }


def written(page: str) -> str:
    """Return the page with tables that match the code. Metrics by user repeat the meter's, so they have no table."""
    for name, metrics in _TABLES.items():
        if name == "users":
            continue
        head, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->\n")
        page = f"{head}{begin}{_table(metrics)}{end}{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
