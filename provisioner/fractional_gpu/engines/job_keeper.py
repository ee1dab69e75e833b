"""Does the node agent's work for Slurm jobs apart from the counts: registers missing seats, ends abandoned ones, and reports usage figures.

If the Prolog could not register a job's seat, the agent does so as soon as the broker answers. If Slurm reports that a job has ended but
its Epilog did not run, the agent ends the seat. The agent writes a running job's usage figures to its AdminComment, at most once per
`comment_ms`, and the final figures to the accounting database. The database may be down, and doesn't know right away that a job has ended,
so the final figures may be delayed by up to `ended_ms`. The agent lists the node's jobs only if a seat is missing or old enough to check.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.engines.accounting import JobFigures, note_leases, sentences_of
from fractional_gpu.engines.engine import EngineError, EngineUnavailableError
from fractional_gpu.engines.hooks import HookSettings, register_late
from fractional_gpu.engines.job_seats import SeatFiles, job_of
from fractional_gpu.engines.slurm import Slurm
from fractional_gpu.protocol.status import SeatStatus

_MS = 1_000_000  # nanoseconds
_AT_ONCE = 8  # for how many jobs one `look` writes the last figures, because each job takes half a second


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperRules:
    jobs_ms: int = 60_000  # how often to list the jobs while there are seats
    young_ms: int = 30_000  # younger seats are not checked, because their jobs may not have begun
    comment_ms: int | None = 300_000
    ended_ms: int = 86_400_000  # how long an ended job's last figures wait for the accounting database


@dataclass(slots=True, kw_only=True)
class _LastFigures:
    text: str
    due_ms: int
    end_ms: int


class JobKeeper:
    def __init__(
        self,
        slurm: Slurm,
        settings: HookSettings,
        rules: KeeperRules,
        say: Callable[[str], None],
        clock_ms: Callable[[], int] = lambda: time.monotonic_ns() // _MS,
    ) -> None:
        self._slurm = slurm
        self._settings = settings
        self._files = SeatFiles(settings.folder)
        self._rules = rules
        self._say = say
        self._clock_ms = clock_ms
        self._asked_ms: int | None = None
        self._commented_ms: int | None = None
        self._figures: dict[int, JobFigures] = {}
        self._accounted: bool | None = None  # whether ended jobs accept comments; None if this is not yet known
        self._last: dict[int, _LastFigures] = {}  # the figures of jobs that have ended
        self._accounting_ms = 0  # when to query the accounting database again
        self._said = ""
        self._said_of_accounting = ""

    def look(self, client: SeatClient, seats: list[SeatStatus]) -> None:
        now = self._clock_ms()
        try:
            self._keep_seats(now, client, seats)
            if self._rules.comment_ms is not None:
                self._keep_figures(now, client, seats, self._rules.comment_ms)
                self._write_last_figures(now, seats, self._rules.comment_ms)
            self._said = ""
        except EngineError as error:
            if str(error) != self._said:
                self._said = str(error)
                self._say(f"cannot read the jobs of this node: {error}")

    def _keep_seats(self, now: int, client: SeatClient, seats: list[SeatStatus]) -> None:
        jobs = {seat.seat_id: job for seat in seats if (job := job_of(seat)) is not None}
        missing = [wanted for wanted in self._files.wanted() if wanted.job_id not in jobs.values()]
        old = [seat.seat_id for seat in seats if seat.seat_id in jobs and seat.age_ms >= self._rules.young_ms]
        if not missing and not old:
            return
        if not missing and self._asked_ms is not None and now < self._asked_ms + self._rules.jobs_ms:
            return
        self._asked_ms = now
        running = {job.job_id for job in self._slurm.jobs() if not job.has_ended}
        for wanted in missing:
            if wanted.job_id in running:
                register_late(self._settings, client, wanted, self._say)
            else:
                self._files.remove(wanted.job_id)
        for seat_id in old:
            if (job := jobs[seat_id]) not in running:
                client.release_seat(seat_id)
                self._files.remove(job)
                self._say(f"job {job} has ended, and its Epilog did not end its seat: the seat is now released")

    def _keep_figures(self, now: int, client: SeatClient, seats: list[SeatStatus], comment_ms: int) -> None:
        ours = {job: seat for seat in seats if (job := job_of(seat)) is not None}
        if any(seat.kernels for seat in ours.values()):
            note_leases(client, self._figures, ours)
        ended = [job for job in self._figures if job not in ours]
        due = self._commented_ms is None or now >= self._commented_ms + comment_ms
        if not self._figures or not (due or ended):
            return
        if due:
            self._commented_ms = now
        texts = sentences_of(client, self._figures)
        if ended:
            self._keep_last_figures(now, {job: texts[job] for job in ended})
        for job, figures in self._figures.items() if due else ():
            if texts[job] != figures.written and self._slurm.comment(job, texts[job]):
                figures.written = texts[job]

    def _keep_last_figures(self, now: int, texts: Mapping[int, str]) -> None:
        if self._accounted is None:
            self._accounted = "slurmdbd" in self._slurm.config().get("AccountingStorageType", "")
        for job, text in texts.items():
            if self._figures.pop(job).written != text and self._accounted:
                self._last[job] = _LastFigures(text=text, due_ms=now, end_ms=now + self._rules.ended_ms)

    def _write_last_figures(self, now: int, seats: list[SeatStatus], comment_ms: int) -> None:
        """Write ended jobs' final figures to the accounting database if they are due. A failure is logged once and never raised."""
        runs = {job_of(seat) for seat in seats}  # a job that was requeued may be running again
        self._last = {job: last for job, last in self._last.items() if job not in runs and now < last.end_ms}
        due = sorted((last.due_ms, job) for job, last in self._last.items() if now >= last.due_ms)
        if not due or now < self._accounting_ms:
            return
        trouble = ""
        for _, job in due[:_AT_ONCE]:
            last = self._last[job]
            last.due_ms = now + comment_ms
            try:
                if self._slurm.comment_in_accounting(job, last.text):
                    del self._last[job]
            except EngineUnavailableError as error:
                trouble = str(error)
                self._accounting_ms = now + comment_ms
                break
            except EngineError as error:
                trouble = str(error)
        if trouble and trouble != self._said_of_accounting:
            self._say(f"the last figures of jobs that have ended are not in the accounting database yet: {trouble}")
        self._said_of_accounting = trouble
