"""The agent's work for ended jobs: their last figures wait for the accounting database, and nothing waits for them."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.core.metering.usage import SHARE_HOUR, Usage
from fractional_gpu.engines.engine import EngineError, EngineUnavailableError
from fractional_gpu.engines.hooks import HookSettings
from fractional_gpu.engines.job_keeper import JobKeeper, KeeperRules
from fractional_gpu.engines.slurm import Slurm
from fractional_gpu.protocol.messages import SLURM, Workload
from fractional_gpu.protocol.status import SeatStatus
from tests.engines.test_slurm_texts import seat

pytestmark = pytest.mark.promise("slurm")

LOOK_MS, COMMENT_MS, ENDED_MS = 100, 1_000, 10_000
DOWN = EngineUnavailableError("slurmdbd is not responding")


class Controller(Slurm):
    """A Slurm whose database knows the ends of the jobs in `known`, or raises `trouble`."""

    def __init__(self) -> None:
        super().__init__("n1")
        self.trouble: EngineError | None = None
        self.known: set[int] = set()
        self.asked: list[int] = []
        self.running: dict[int, str] = {}
        self.ended: dict[int, str] = {}

    def config(self) -> dict[str, str]:
        return {"AccountingStorageType": "accounting_storage/slurmdbd"}

    def comment(self, job_id: int, text: str) -> bool:
        self.running[job_id] = text
        return True

    def comment_in_accounting(self, job_id: int, text: str) -> bool:
        self.asked.append(job_id)
        if self.trouble is not None:
            raise self.trouble
        if job_id in self.known:
            self.ended[job_id] = text
        return job_id in self.known


class Node:
    """A keeper at `now`, and a broker with one kernel per seat, whose use grows by an hour at each look."""

    def __init__(self, folder: Path) -> None:
        self.now = self.hours = 0
        self.slurm = Controller()
        self.said: list[str] = []
        rules = KeeperRules(comment_ms=COMMENT_MS, ended_ms=ENDED_MS)
        settings = HookSettings(socket="", folder=folder)
        self.keeper = JobKeeper(self.slurm, settings, rules, self.said.append, lambda: self.now)

    def look(self, *jobs: int, after_ms: int = LOOK_MS) -> None:
        """Look at the seats of these jobs."""
        self.now += after_ms
        self.hours += 1
        usage = Usage(busy_share=self.hours * SHARE_HOUR)
        entries = [SimpleNamespace(of={"lease": f"l{job}"}, currency="", usage=usage) for job in range(20)]
        leases = [SimpleNamespace(spec=SimpleNamespace(seat=f"s{job}"), lease_id=f"l{job}") for job in jobs]
        client = SimpleNamespace(
            status=lambda: SimpleNamespace(leases=leases), usage=lambda *_: SimpleNamespace(entries=entries)
        )
        seats: list[SeatStatus] = [
            seat(seat_id=f"s{job}", workload=Workload(engine=SLURM, id=str(job)), kernels=1) for job in jobs
        ]
        self.keeper.look(cast("SeatClient", client), seats)


def test_a_database_that_is_down_keeps_no_job_from_its_comment_and_gets_the_last_figures_when_it_is_back(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    node.look(1, 2)
    node.slurm.trouble, node.slurm.known = DOWN, {1}
    node.look(2)
    node.look(2, after_ms=COMMENT_MS)
    assert "busy=3.000h" in node.slurm.running[2]
    assert len(node.said) == 1
    assert "slurmdbd is not responding" in node.said[0]

    node.slurm.trouble = None
    node.look(2, after_ms=COMMENT_MS)
    assert "busy=2.000h" in node.slurm.ended[1]
    node.look(2, after_ms=COMMENT_MS)
    assert node.slurm.asked == [1, 1, 1]  # not again


def test_a_database_that_is_down_is_asked_for_one_job_at_a_time(tmp_path: Path) -> None:
    """Each question may take a command's whole time limit, and the counts wait meanwhile."""
    node = Node(tmp_path)
    node.look(1, 2, 3)
    node.slurm.trouble = DOWN
    for _ in range(3):
        node.look()
    assert node.slurm.asked == [1]


def test_a_requeued_job_that_runs_again_keeps_its_new_figures(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.look(1)
    node.look()
    node.slurm.known = {1}
    node.look(1)
    node.look(1, after_ms=COMMENT_MS)
    assert node.slurm.ended == {}
    assert "busy=4.000h" in node.slurm.running[1]
