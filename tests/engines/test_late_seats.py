"""A job's Epilog may run while the agent registers the job's seat late: nothing of the job is left, whatever comes first."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.engines.hooks import HookSettings, register_late
from fractional_gpu.engines.job_seats import JobSeat, SeatFiles
from fractional_gpu.protocol.errors import NotFoundError
from fractional_gpu.protocol.messages import SLURM, ProgressKind, Workload
from fractional_gpu.protocol.seats import SeatProgress, SeatRequest
from fractional_gpu.protocol.status import SeatStatus
from tests.engines.test_slurm_texts import seat

pytestmark = pytest.mark.promise("slurm")

JOB = JobSeat(job_id=7, uid=os.getuid(), user="root", pool="default", fraction_milli=500)


class Broker:
    """A broker's seats. `reached` is called at each step of a registration."""

    def __init__(self, reached: Callable[[str], None]) -> None:
        self.of: dict[str, SeatStatus] = {}
        self._reached = reached

    def take_seat(self, request: SeatRequest) -> Iterator[SeatProgress]:
        assert request.workload is not None
        self._reached("take")
        self.of["s"] = seat(seat_id="s", workload=Workload(engine=SLURM, id=request.workload.id))
        yield SeatProgress(kind=ProgressKind.GRANTED, seat_id="s", token="t", memory_mib=512)  # noqa: S106

    def confirm_seat(self, seat_id: str) -> None:
        self._reached("confirm")
        if seat_id not in self.of:
            raise NotFoundError(f"there is no seat {seat_id!r}")

    def seats(self) -> SimpleNamespace:
        self._reached("list")
        return SimpleNamespace(seats=list(self.of.values()))

    def release_seat(self, seat_id: str) -> None:
        del self.of[seat_id]


@pytest.mark.parametrize("moment", ["list", "take", "confirm", "never"])
def test_nothing_is_left_of_a_job_that_ends_during_its_late_registration(moment: str, tmp_path: Path) -> None:
    files, due = SeatFiles(tmp_path), [moment]

    def reached(step: str) -> None:
        if step in due:
            due.clear()
            files.release(cast("SeatClient", broker), JOB.job_id)
            files.remove(JOB.job_id)

    broker = Broker(reached)
    files.prepare()
    with files.writing_wanted(JOB):
        pass
    said: list[str] = []
    register_late(HookSettings(socket="", folder=tmp_path), cast("SeatClient", broker), JOB, said.append)
    left = sorted(path.suffix for path in tmp_path.iterdir())
    assert (left, list(broker.of)) == (([".env", ".json", ".wanted"], ["s"]) if moment == "never" else ([], []))
