"""An existing Slurm site: the installation page followed line by line, and jobs from its users' environments."""

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.errors import FractionalGPUError
from tests.site.blocks import blocks, commands
from tests.support.paths import ROOT
from tests.support.slurm import Cluster, new_cluster
from tests.support.slurm import fields as fields_of
from tests.support.slurm_site import View, new_environment, new_site
from tests.support.world import until

pytestmark = pytest.mark.promise("slurm")

PAGE = ROOT / "docs" / "clusters.md"
UNIT = ROOT / "provisioner" / "fractional_gpu" / "config" / "service" / "jupyter-gpu.service"


class Page:
    """The page's commands, typed on the site's node n1, which gets shares. `n2` never has the package."""

    def __init__(self, cluster: Cluster, views: dict[str, View]) -> None:
        self.cluster, self.views = cluster, views
        self.view = views["n1"]
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.said = ""
        text = PAGE.read_text()
        heads = [(number, line[3:]) for number, line in enumerate(text.splitlines(), 1) if line.startswith("## ")]
        self.sections: dict[str, list[str]] = {}
        for block in blocks(PAGE):
            if block.language == "bash":
                head = [name for number, name in heads if number < block.line][-1]
                self.sections.setdefault(head, []).extend(commands(block.text))
            elif block.language == "python":
                (cluster.folder / "view.n1" / "etc" / "config.py").write_text(block.text)
        self.type("mv /etc/config.py /etc/jupyter/jupyter_gpu_config.py")

    def follow(self, section: str) -> Iterator[str]:
        """Type the section's commands; yield each one after it has run."""
        assert self.sections[section]
        for command in self.sections[section]:
            words = shlex.split(command)
            if words[:3] == ["python3", "-m", "venv"]:
                new_environment(self.cluster.folder / "view.n1" / "opt" / "jupyter-gpu", Path(words[3]), ours=True)
            elif words[0] == "systemctl":
                self.systemctl(*(word for word in words[1:] if word != "--now"))
            elif words[1] != "install":  # for pip: what is installed is this checkout
                self.type(command.replace("gpu[01-08]", "n1").replace("--mem=24G", "--mem=2G"))
            yield command

    def type(self, command: str) -> str:
        """Run a command and return what it printed."""
        node = "" if "node install" not in command and "node doctor" not in command else " --node n1"
        done = self.view.run("bash", "-euo", "pipefail", "-c", command + node)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        self.said = done.stdout
        return done.stdout

    def systemctl(self, action: str, unit: str) -> None:
        """Do what systemd does with the page's units."""
        match action, unit:
            case "enable", "jupyter-gpu":
                text = UNIT.read_text()
                # A broker of another test may have claimed the same socket in this network namespace.
                self.start(unit, text, " --simulate 1x1GiB", "unshare", "-n", XDG_STATE_HOME="/var/lib/state")
                until(self._serves, "the broker serves")
            case "enable", "jupyter-gpu-agent":
                text = self.type(f"cat /etc/systemd/system/{unit}.service")
                self.start(unit, text, " --every 1s --floor 200ms --jitter 0")
                until(lambda: self.cluster.node("n1").get("Extra"), "the agent has published", pause_s=0.1)
            case "disable", _:
                self.stop(unit)
            case "restart", "slurmctld":
                self.cluster.stop_controller()
                self.cluster.start_controller()
            case "restart", "slurmd":
                for node in self.cluster.nodes:
                    self.cluster.restart_node(node)
            case _:
                raise AssertionError((action, unit))

    def start(self, name: str, unit: str, more: str, *before: str, **environment: str) -> None:
        """Start a unit's command in its environment."""
        given = dict(re.findall('^Environment="(.*?)=(.*)"$', unit, re.MULTILINE))
        (command,) = re.findall("^ExecStart=(.*)$", unit, re.MULTILINE)
        self.services[name] = self.view.start(command + more, *before, **environment, **given)

    def stop(self, name: str) -> None:
        """End a unit."""
        if (service := self.services.pop(name, None)) is not None:
            service.send_signal(signal.SIGTERM)
            service.wait(60)

    def _serves(self) -> bool:
        assert self.services["jupyter-gpu"].poll() is None, self.view.log.read_text()
        with suppress(FractionalGPUError), SeatClient(self.cluster.nodes[0].socket) as client:
            client.status()
            return True
        return False

    def files(self) -> dict[str, bytes]:
        """Return the site's files, and the names of what is added next to them."""
        folder = self.cluster.folder
        names = ("slurm.conf", "nodes.conf", "gres.conf", "cgroup.conf", "site-taskprolog", "prolog.d/10-log")
        wrappers = {file.name: b"" for file in folder.glob("jupyter*")}
        return {**{name: (folder / name).read_bytes() for name in names}, **wrappers}

    def drained(self) -> list[str]:
        """Return nodes that are drained for any reason but the page's."""
        lines = self.cluster.call("scontrol", "show", "node", "-o").splitlines()
        return [
            f"{fields['NodeName']}: {fields['State']} {fields.get('Reason')}"
            for fields in map(fields_of, lines)
            if ("DRAIN" in fields["State"] or "DOWN" in fields["State"])
            and not fields.get("Reason", "").startswith("jupyter-gpu")
        ]


@pytest.fixture(scope="module")
def site() -> Iterator[Page]:
    with new_site() as (cluster, views):
        page = Page(cluster, views)
        try:
            yield page
        finally:
            for unit in list(page.services):
                page.stop(unit)


def job_on(site: Page, node: str, *options: str) -> str:
    """Run a job and return its output."""
    job = site.cluster.sbatch("echo $SITE $SLURMD_NODENAME", "-w", node, *options)
    site.cluster.await_job(job, "COMPLETED")
    return site.cluster.output(job)


def doctor(site: Page, *words: str) -> dict[str, str]:
    """Return the doctor's problems, by check."""
    done = site.view.run("/opt/jupyter-gpu/bin/jupyter", "gpu", "node", "doctor", "--json", "--node", "n1", *words)
    found = json.loads(done.stdout)["findings"]
    assert done.returncode == any(one["severity"] == "error" for one in found)
    return {one["check"]: f"{one['finding']} | {one['advice']}" for one in found if one["severity"] == "error"}


def a_node_without_the_wrapper_is_found(site: Page) -> None:
    assert site.views["n2"].run("mount", "--bind", "/usr", "/etc/slurm").returncode == 0
    try:
        found = doctor(site, "--everywhere")
        assert list(found) == ["n2"]
        assert "/etc/slurm/jupyter-gpu-wrapper is missing" in found["n2"]
    finally:
        assert site.views["n2"].run("umount", "/etc/slurm").returncode == 0


def the_doctor_sees_that_a_restart_is_missing(site: Page) -> None:
    site.cluster.call("scontrol", "reconfigure")
    assert "restart slurmctld, then each slurmd" in doctor(site)["counts"]


def the_doctor_finds_a_key_given_twice_and_a_prolog_that_does_not_find_slurm_and_install_keeps_an_edit(
    site: Page,
) -> None:
    conf, script = site.cluster.folder / "nodes.conf", "/etc/jupyter-gpu/slurm/prolog"
    text = conf.read_text()
    conf.write_text(f"{text}\nGresTypes=gpu\n")
    site.type(f"sed -i s,/opt/slurm/bin:,, {script}")
    found = doctor(site)
    assert "GresTypes=gpu,jgpu (/etc/slurm/slurm.conf" in found["given twice"]
    assert "cannot run the command `squeue`" in found["hook"]
    conf.write_text(text)
    done = site.view.run("/opt/jupyter-gpu/bin/jupyter", "gpu", "node", "install", "--node", "n1")
    assert done.returncode == 1
    assert f"{script} differs and was not changed" in done.stdout
    assert site.type(f"diff {script} {script}.new || true").count("/opt/slurm/bin") == 1
    site.type("/opt/jupyter-gpu/bin/jupyter gpu node install --force")
    assert doctor(site) == {}


def steps(site: Page, section: str) -> Iterator[str]:
    """Type the section's commands: no node is drained, and on a node without ours the site's own scripts run after every change for it."""
    files: dict[str, bytes] = {}
    for command in site.follow(section):
        assert site.drained() == [], command
        if files != (files := site.files()) or command.startswith(("systemctl restart", "rm ")):
            assert job_on(site, "n2") == "yes n2\n", command
        yield command


def test_the_page_installs_shares_on_a_site_and_takes_them_away_without_draining_a_node(site: Page) -> None:
    before = site.files()
    for command in steps(site, "Step by step"):
        if "--everywhere" in command:
            assert "on 2 nodes: n1, n2" in site.said
            a_node_without_the_wrapper_is_found(site)
        if command.startswith("patch"):
            the_doctor_sees_that_a_restart_is_missing(site)
        if command.endswith("node doctor"):
            the_doctor_finds_a_key_given_twice_and_a_prolog_that_does_not_find_slurm_and_install_keeps_an_edit(site)
    assert "JUPYTER_GPU_SEAT_FILE=/run/jupyter-gpu/seats/job-" in site.said
    assert "GresTypes=gpu,jgpu\n" in (site.cluster.folder / "slurm.conf").read_text()
    assert job_on(site, "n2", "--gres=gpu:1").endswith("yes n2\n")
    assert job_on(site, "n1", "--gres=jgpu:open:250", "--mem=2G").endswith("yes n1\n")
    logged = (site.cluster.folder / "prolog.log").read_text().split()
    assert len(logged) == len(set(logged))
    for _ in steps(site, "Uninstall"):
        pass
    assert site.files() == before
    assert job_on(site, "n1", "--gres=gpu:1") == "yes n1\n"
    assert site.cluster.node("n1")["Gres"] == "gpu:1"


def submits_by_lua(cluster: Cluster) -> None:
    (cluster.folder / "job_submit.lua").write_text((ROOT / "examples" / "slurm" / "job_submit.lua").read_text())
    cluster.conf.write_text(f"{cluster.conf.read_text()}JobSubmitPlugins=lua\n")


def test_the_example_of_a_submit_plugin_refuses_jobs_that_would_have_no_share() -> None:
    with new_cluster(edit=submits_by_lua) as slurm:

        def said(*options: str) -> str:
            done = subprocess.run(
                ["sbatch", "--test-only", "--wrap=true", *options],
                env=slurm.environment, cwd="/", capture_output=True, text=True, check=False,
            )  # fmt: skip
            return "" if done.returncode == 0 else done.stderr

        share = "--gres=jgpu:open:250"
        assert "--mem=21504M" in said(share, "--mem=8G", "--partition=gpu")
        assert "--mem=21504M" in said(share, "--mem-per-cpu=8G", "--cpus-per-task=2", "--partition=gpu")
        assert "is for jobs with a share" in said("--partition=gpu")
        assert "in thousandths" in said("--gres=jgpu:250")
        assert said(share, "--mem=21504M", "--partition=gpu") == ""
        assert said(share, "--mem-per-cpu=11G", "--cpus-per-task=2", "--partition=gpu") == ""
        assert said(share, "--mem=0", "--partition=gpu") == ""
