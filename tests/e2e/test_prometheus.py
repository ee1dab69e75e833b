"""A real Prometheus scrapes a broker whose kernels suspend and resume; the dashboard's and the alerts' expressions return the facts.

`promtool` and `prometheus` come with Debian's package prometheus, which `tests/run setup` installs. Without them these tests fail.
"""

import json
import os
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from examples.monitoring import dashboard
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import NoRoomError
from fractional_gpu.protocol.messages import LeaseRequest
from tests.broker.api.metrics_page import PAGE, names
from tests.support.pair import Pair, new_pair
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.stories import CHECK
from tests.support.world import DEADLINE_S, until

pytestmark = pytest.mark.promise("alerts")

MONITORING = ROOT / "examples" / "monitoring"
ALERTS = MONITORING / "alerts.yml"
CONFIG = """
c.GPUBroker.metrics_address = "127.0.0.1:{port}"
c.GPUBroker.metrics_users = True
c.GPUBroker.pools = {{"default": {{"price": "3600 EUR"}}}}
"""
SCRAPE = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 1s}}
rule_files: ["{alerts}"]
scrape_configs:
  - job_name: jupyter-gpu
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{hub: lab}}}}]
"""
VARIABLES = {"$hub": ".*", "$instance": ".*", "$pool": ".*", "$__rate_interval": "10s", "$__range": "1m"}


def promtool(*words: str, text: str | None = None) -> str:
    done = subprocess.run(["promtool", *words], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/"

    def is_ready(self) -> bool:
        with suppress(URLError, ConnectionError), self._get("-/ready") as reply:
            return bool(reply.status == 200)
        return False

    def call(self, path: str, **query: str) -> Any:  # noqa: ANN401 - JSON
        with self._get(f"api/v1/{path}?{urllib.parse.urlencode(query)}") as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expr: str) -> list[Any]:
        try:
            found: list[Any] = self.call("query", query=expr)["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from error
        return found

    def value(self, expr: str) -> float:
        """Return the one value of an expression; 0 if it has no series."""
        found = self.query(expr)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else 0.0

    def _get(self, path: str) -> Any:  # noqa: ANN401 - an HTTP response
        return urllib.request.urlopen(self._url + path, timeout=DEADLINE_S)  # noqa: S310 - loopback


@contextmanager
def prometheus(folder: Path, scraped_port: int) -> Iterator[Prometheus]:
    port, config = free_port(), folder / "prometheus.yml"
    config.write_text(SCRAPE.format(alerts=ALERTS, port=scraped_port))
    argv = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *argv], stdout=log, stderr=log, cwd=folder, env={**os.environ})
    try:
        made = Prometheus(port)
        until(made.is_ready, "Prometheus serves")
        yield made
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def told(port: int) -> Iterator[Pair]:
    with new_pair(CONFIG.format(port=port)) as pair:
        yield pair


@pytest.fixture(scope="module")
def scraping(told: Pair, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen two kernels take turns, a refused lease and one that ended."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), port) as made:
        first, second = told.ready()
        until(lambda: made.value('jupyter_gpu_leases{state="suspended"}') == 1, "it has seen one of them suspended")
        with BrokerClient(told.world.socket) as client:
            with pytest.raises(NoRoomError, match=r"1/3|333"):
                client.create_lease(LeaseRequest(fraction_milli=333))
            ended = client.create_lease(LeaseRequest(fraction_milli=250))
        with BrokerClient(told.world.socket, token=ended.token) as client:
            client.release(ended.lease_id)
        for notebook in (first, second):
            assert notebook.must(CHECK).text == "intact\n"
        seen = "min(count_over_time(jupyter_gpu_leases_ended_total[1m])) > 2 and on () jupyter_gpu_grants_total >= 4"
        until(lambda: made.query(seen), "it has seen all of that, three times")
        yield made


# -- the files --------------------------------------------------------------------------------------------------------------


def test_promtool_accepts_the_alerts_and_fires_each_in_their_test() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", str(ALERTS))
    assert "SUCCESS" in promtool("test", "rules", str(ALERTS.with_name("alerts_test.yml")))
    fired = set(re.findall(r'alertname="(\w+)"', ALERTS.with_name("alerts_test.yml").read_text()))
    assert fired == set(alerts())


def alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)\n", ALERTS.read_text())


def test_each_alert_says_what_happened_and_where_to_read_on() -> None:
    each = ALERTS.read_text().split("- alert: ")[1:]
    for name, text in zip(alerts(), each, strict=True):
        for field in ("summary: ", "description: ", f"runbook_url: docs/metrics.md#{name.lower()}\n", "{severity: "):
            assert field in text, (name, field)
        assert f"\n### {name}\n" in PAGE.read_text(), f"docs/metrics.md says what to do at {name}"


def test_alerts_and_dashboard_ask_for_metrics_that_exist() -> None:
    for text in (ALERTS.read_text(), dashboard.TARGET.read_text()):
        asked = set(re.findall(r"jupyter_gpu_\w+", text))
        assert len(asked) > 10
        assert asked <= names()


def test_the_dashboard_is_what_its_script_writes() -> None:
    assert dashboard.TARGET.read_text() == dashboard.text(), "write it again: python examples/monitoring/dashboard.py"


def test_the_dashboards_panels_are_complete_and_lie_beside_each_other() -> None:
    board, taken = dashboard.dashboard(), set[tuple[int, int]]()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert all(target["datasource"]["uid"] == "$PROMETHEUS_DS" for target in panel["targets"])


# -- in a real Prometheus ---------------------------------------------------------------------------------------------------


def test_promtool_accepts_the_metrics(scraping: Prometheus, port: int) -> None:
    assert scraping.value("up") == 1
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as reply:
        promtool("check", "metrics", text=reply.read().decode())


def test_every_expression_of_the_dashboard_returns_series(scraping: Prometheus) -> None:
    asked = [
        (panel["title"], target["expr"])
        for panel in json.loads(dashboard.TARGET.read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    assert len(asked) > 40
    assert [(title, expr) for title, expr in asked if not scraping.query(filled_in(expr))] == []


def filled_in(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr


def test_every_variable_of_the_dashboard_has_values(scraping: Prometheus) -> None:
    found = {}
    for variable in dashboard.dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
            assert match is not None
            found[variable["name"]] = scraping.call(f"label/{match[2]}/values", **{"match[]": match[1]})
    assert found["hub"] == ["lab"]
    assert found["pool"] == ["default"]
    assert len(found["instance"]) == 1


def test_every_alert_is_evaluated_and_none_fires_where_all_is_well(scraping: Prometheus) -> None:
    def evaluated() -> list[Any] | None:
        (group,) = scraping.call("rules")["groups"]
        absent = [
            rule["state"] for rule in group["rules"] if "absent(" in rule["query"]
        ]  # pending until the first scrape is over
        known = all(rule["health"] != "unknown" for rule in group["rules"]) and set(absent) == {"inactive"}
        return group["rules"] if known else None

    rules = until(evaluated, "Prometheus has evaluated every rule after its first scrape")
    assert sorted(rule["name"] for rule in rules) == sorted(alerts())
    for rule in rules:
        assert (rule["health"], rule["state"]) == ("ok", "inactive"), rule
        scraping.query(rule["query"])


def test_the_counters_say_what_the_kernels_did(scraping: Prometheus) -> None:
    assert scraping.value('jupyter_gpu_swap_seconds_count{kind="suspend"}') >= 3
    assert scraping.value('jupyter_gpu_swap_seconds_count{kind="resume"}') >= 2
    assert scraping.value("jupyter_gpu_moved_bytes_total") > 0
    # Of one scrape: what swaps moved, the sum of all users' use (counted milliseconds apart), and 1 EUR for each GPU
    # second.
    same = {
        "jupyter_gpu_moved_bytes_total - on () sum(jupyter_gpu_swap_bytes_total)": 0,
        "jupyter_gpu_held_gpu_seconds_total - on () sum(jupyter_gpu_user_held_gpu_seconds_total)": 0.1,
        "jupyter_gpu_charged_amount_total - on () jupyter_gpu_charged_gpu_seconds_total": 0.01,
    }
    for expr, off in same.items():
        assert abs(scraping.value(expr)) <= off, expr
    assert scraping.value("jupyter_gpu_suspended_gpu_seconds_total") > 0
    assert scraping.value("jupyter_gpu_charged_amount_total") > 0
    drawn = "jupyter_gpu_energy_joules_total >= jupyter_gpu_lease_energy_joules_total > 0"
    until(lambda: scraping.query(drawn), "the devices' energy was read twice")


def test_no_counter_ever_fell(scraping: Prometheus) -> None:
    kept = [
        name
        for name in scraping.call("label/__name__/values")
        if re.fullmatch(r"jupyter_gpu_\w+_(total|count|bucket)", name)
    ]
    assert len(kept) > 40
    assert [name for name in kept if any(one["value"][1] != "0" for one in scraping.query(f"resets({name}[5m])"))] == []
