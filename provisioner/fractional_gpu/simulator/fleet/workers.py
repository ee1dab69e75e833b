"""Processes that share a list of jobs. Their number changes how long the jobs take, and nothing of what comes out.

Each process is started anew (`spawn`), reads jobs from a pipe and answers there: with None at the end of each session, and then with the
job's outcome, or with the SimulationError that it raised. The parent hands out jobs in their order and yields outcomes in that order, so it
keeps those that come early; it hands out no job that is more than `_AHEAD` jobs for each process ahead of the outcome that is due.
"""

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeAlias, TypeVar

from fractional_gpu.simulator import SimulationError

_Job = TypeVar("_Job")
_Outcome = TypeVar("_Outcome")
_AHEAD = 4

Work: TypeAlias = Callable[[_Job, Callable[[], None]], _Outcome]
"""What is done for a job: a function of a module. It calls its second argument at the end of each session, and never returns None."""


def in_processes(
    work: Work[_Job, _Outcome], jobs: Iterable[_Job], processes: int, ended: Callable[[], None]
) -> Generator[_Outcome, None, None]:
    """Yield the outcomes of the jobs in their order; `ended` is called at the end of each session.

    Closing the generator ends the processes at once. Raises SimulationError where `work` does, and for a process that ends too early.
    """
    workers: list[_Worker[_Job, _Outcome]] = []
    try:
        workers += (_Worker(work) for _ in range(processes))
        yield from _outcomes(workers, enumerate(jobs), ended)
    finally:
        for worker in workers:
            worker.end()


def _outcomes(
    workers: "list[_Worker[_Job, _Outcome]]", jobs: Iterator[tuple[int, _Job]], ended: Callable[[], None]
) -> Generator[_Outcome, None, None]:
    done: dict[int, _Outcome | SimulationError] = {}
    handed_out = due = 0
    while True:
        for worker in workers:
            if worker.number is None and handed_out < due + _AHEAD * len(workers):
                handed_out += worker.take(next(jobs, None))
        busy = [worker for worker in workers if worker.number is not None]
        if not busy:
            return
        answered = wait([worker.link for worker in busy])
        for worker in busy:
            if worker.link in answered:
                worker.answer(done, ended)
        while due in done:
            outcome = done.pop(due)
            if isinstance(outcome, SimulationError):  # in its turn: which of several is raised depends on no speed
                raise outcome
            yield outcome
            due += 1


class _Worker(Generic[_Job, _Outcome]):
    """One of the processes, and the job that it is at (`number`; None: it waits for one)."""

    def __init__(self, work: Work[_Job, _Outcome]) -> None:
        context = multiprocessing.get_context("spawn")
        self.link, theirs = context.Pipe()
        self.number: int | None = None
        self._process = context.Process(target=_serve, args=(work, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the process's end is the end of what is read here

    def take(self, job: tuple[int, _Job] | None) -> int:
        """Hand it a job, if there is one; return how many that were. Raises SimulationError where the process has ended."""
        if job is None:
            return 0
        self.number = job[0]
        try:
            self.link.send(job[1])
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended_early() from None
        return 1

    def answer(self, done: dict[int, _Outcome | SimulationError], ended: Callable[[], None]) -> None:
        """Read what it says: that a session ended, or the outcome of its job. Raises SimulationError where the process has ended."""
        try:
            said: Any = self.link.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended_early() from None
        if said is None:
            ended()
        elif self.number is not None:
            done[self.number] = said
            self.number = None

    def _ended_early(self) -> SimulationError:
        self._process.join()
        code = self._process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return SimulationError(
            f"the process that simulated host {self.number} ended early ({how}); run fewer at the same time with --processes, or on a "
            "machine with more memory"
        )

    def end(self) -> None:
        """End the process, whatever it is at."""
        self.link.close()
        if self.number is not None:
            self._process.terminate()
        self._process.join()
        self._process.close()


def _serve(work: Work[_Job, _Outcome], link: "Connection[Any, Any]") -> None:
    """Do jobs until the parent closes its end, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent ends this one
    try:
        while True:
            job: _Job = link.recv()
            try:
                said: _Outcome | SimulationError = work(job, partial(link.send, None))
            except SimulationError as error:
                said = error
            link.send(said)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
