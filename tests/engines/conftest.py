"""In this folder each file's tests share a Slurm of two nodes. Its logs are printed with a failure."""

import os
from collections.abc import Generator, Iterator

import pytest

from tests.support.paths import PYTHONPATH
from tests.support.slurm import Cluster, new_cluster
from tests.support.slurm_nodes import GPUNode, install_scripts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for given in getattr(item, "funcargs", {}).values():
            if isinstance(given, Cluster):
                report.sections.extend((f"{name} of Slurm", text[-4000:]) for name, text in given.logs().items())
            nodes = given if isinstance(given, list) else []
            for node in nodes:
                if isinstance(node, GPUNode):
                    report.sections.extend(
                        (f"{name} of {node.node.name}", node.log(name)[-6000:])
                        for name in ("agent.out", "broker.out")
                        if (node.node.run / name).exists()
                    )
    return report


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        with new_cluster(scripts=lambda nodes: install_scripts(nodes, os.environ, "--no-groups")) as cluster:
            yield cluster
