"""The kernel's line to the broker: commands in, answers and pulses out.

Two daemon threads, started a moment after the kernel so that they take nothing from its start: one reads the stream of commands and
obeys at once what needs no round trip; the other sends the answers on a second connection. While the gate is not open it sends a pulse
every `PULSE_S` seconds, too, which proves that Python runs, to a broker that does not hear by itself whether its stream is read. A
broken stream is tried again with growing pauses, whatever a cell did to this process (`local_failures`), and what it cannot do is answered
with "busy": without this line the kernel would be deaf. An answer that cannot be sent is tried again for as long as the broker waits for
it; then the kernel's user is told once that the broker goes by what it sees. The line never starts a broker: a kernel that nobody uses
needs none, and a cell that waits starts one itself.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from fractional_gpu_kernel.cells.acquire import LOCAL_FAILURES, describe, is_local
from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.memory.shrink import Shrinker
from fractional_gpu_kernel.settings import Settings

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient
    from fractional_gpu.protocol.messages import GateAnswer, GateCommand

__all__ = ["Link"]

SETTLE_S = 0.1  # the kernel's own start comes first
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
SEND_AGAIN_S = 0.2
SEND_ATTEMPTS = 10  # the broker waits for about as long
UNHEARD = (
    "This kernel cannot answer the GPU broker ({why}). Nothing is lost: while the kernel idles, the broker may move its GPU memory to host "
    "memory after a short wait, and brings it back for the next cell."
)
LONGEST_PAUSE_UNKNOWN_S = (
    30.0  # the broker answers, but does not know (or want) this lease: nothing is likely to change soon
)


class Link:
    """One kernel's line. `notice` takes a sentence to show; `limit` the variables of a lease that has another size now.

    `managed` returns why the process cannot be saved, as far as is known by now, `inputs` the requests that use no GPU. `look` begins to
    find out whether the cells that run can do without the GPU, and returns whether that is under way.
    """

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        shrinker: Shrinker,
        notice: Callable[[str], None],
        limit: Callable[[Mapping[str, str]], None],
        *,
        managed: Callable[[], str] = str,
        inputs: Callable[[], list[str]] = list,
        look: Callable[[], bool] = bool,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._shrinker = shrinker
        self._notice = notice
        self._limit = limit
        self._managed = managed
        self._inputs = inputs
        self._look = look
        self._stop = threading.Event()
        self._answers: SimpleQueue[tuple[int, str, str] | None] = SimpleQueue()  # number, word, detail; None: wake up
        self._clients: list[BrokerClient] = []
        self._heard = False  # the broker knows by itself that Python runs
        self._listens = False
        self._told_unheard = False

    def start(self) -> None:
        """Start both threads; returns at once."""
        for work, name in ((self._read, "gpu-gate"), (self._send, "gpu-answers")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def stop(self) -> None:
        """Hang up; the threads end soon."""
        self._stop.set()
        self._answers.put(None)
        for client in list(self._clients):
            client.close()

    @property
    def listens(self) -> bool:
        """Whether the broker's commands come through."""
        return self._listens

    def exempt(self, on: bool) -> None:
        """Tell that the cell that begins does not use the GPU, or that it is over, so that it gets no ticket. Never blocks."""
        if not on:
            self._answers.put((0, "done", ""))
        elif not self._gate.is_open:
            self._answers.put((0, "exempt", ""))

    def tell_inputs(self, requests: Sequence[str]) -> None:
        """Tell which requests use no GPU now: they wait for input, or are barred. Never blocks."""
        self._answers.put((0, "input", " ".join(requests)))

    def tell_managed(self, sentence: str) -> None:
        """Tell that the process cannot be saved from now on, and why. Never blocks."""
        self._answers.put((0, "managed", sentence))

    def _connect(self) -> "BrokerClient":
        client = self._settings.connect()
        self._clients.append(client)
        if self._stop.is_set():
            client.close()
        return client

    def _hang_up(self, client: "BrokerClient | None") -> None:
        if client is not None:
            client.close()
            if client in self._clients:
                self._clients.remove(client)

    def _read(self) -> None:
        self._stop.wait(SETTLE_S)
        # A process that runs out of descriptors can import nothing any more, and its cells wait, too.
        import fractional_gpu_kernel.display.wait_line  # noqa: F401, PLC0415 - loaded for later, off the kernel's start
        from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError  # noqa: PLC0415 - off the kernel's start

        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            longest = LONGEST_PAUSE_S
            try:
                heard = self._listen()
                pause = FIRST_PAUSE_S if heard else pause
            except FractionalGPUError as error:
                if not (isinstance(error, BrokerUnavailableError) or is_local(error)):
                    longest = LONGEST_PAUSE_UNKNOWN_S
            except LOCAL_FAILURES:
                pass  # this process cannot call: a cell that needs the GPU says so
            self._stop.wait(pause)
            pause = min(pause * 2, longest)

    def _listen(self) -> bool:
        """Obey one stream until it ends; returns whether anything came. Raises FractionalGPUError if it broke before the first line."""
        from fractional_gpu import __version__  # noqa: PLC0415 - off the kernel's start
        from fractional_gpu.protocol.errors import BrokerUnavailableError  # noqa: PLC0415 - off the kernel's start
        from fractional_gpu.protocol.messages import GateHello  # noqa: PLC0415 - off the kernel's start

        heard = False
        client = self._connect()
        try:
            hello = GateHello(
                version=__version__,
                open=self._gate.is_open,
                busy=self._gate.is_busy,
                managed=self._managed(),
                inputs=self._inputs(),
            )
            for number, command in enumerate(client.gate(self._settings.lease_id, hello)):
                self._listens = True
                heard = heard or bool(
                    number or command.verb
                )  # not its greeting: whoever says no more may be gone at once
                self._heard = self._heard or command.hears
                self._try_to_obey(command)
                with suppress(*LOCAL_FAILURES):  # obeying goes before, and on
                    self._settings.look_after_token()
        except BrokerUnavailableError:
            if not heard:
                raise
        finally:
            self._listens = False
            self._hang_up(client)
            if self._heard:  # the next one may be another version
                self._heard = False
                self._answers.put(None)
        return heard

    def _try_to_obey(self, command: "GateCommand") -> None:
        """Obey; a process that cannot (out of threads or descriptors, a closed main loop, replaced functions) says so instead."""
        try:
            self._obey(command)
        except LOCAL_FAILURES as error:
            self._answer(command.number, "busy", f"this kernel could not do it: {describe(error)}"[:200])

    def _obey(self, command: "GateCommand") -> None:
        from fractional_gpu.protocol.messages import CELL_BARRED, GateVerb  # noqa: PLC0415 - off the kernel's start

        number = command.number
        match command.verb:
            case "":
                return
            case GateVerb.CLOSE:
                self._answer(number, self._gate.close(), CELL_BARRED if self._gate.is_barred else "")
            case GateVerb.PREEMPT:
                self._answer(number, self._gate.preempt(), self._cells(look=number != 0))
            case GateVerb.LIMIT:
                self._limit(command.environment)
                self._answer(number, "done")
            case GateVerb.OPEN:
                self._gate.open(command.environment)
                self._answer(number, "open")
            case GateVerb.SHRINK:
                self._shrinker.shrink(lambda word, detail: self._answer(number, word, detail))
            case GateVerb.NOTICE:
                self._notice(command.sentence)
                self._answer(number, "done")
            case _:
                self._answer(number, "busy", f"this kernel's extension does not know the command {command.verb[:50]!r}")

    def _cells(self, *, look: bool) -> str:
        """Return what the cells do, now that the gate is shut; with `look`, begin to find out whether they can do without the GPU."""
        from fractional_gpu.protocol.messages import (  # noqa: PLC0415 - off the kernel's start
            CELL_BARRED,
            CELL_EXAMINED,
            CELL_RUNS,
            NO_CELL_RUNS,
        )

        if self._gate.is_running:
            return CELL_EXAMINED if look and self._look() else CELL_RUNS
        return CELL_BARRED if self._gate.is_barred else NO_CELL_RUNS

    def _answer(self, number: int, word: str, detail: str = "") -> None:
        if number:  # 0: nobody waits for an answer
            self._answers.put((number, word, detail))

    def _send(self) -> None:
        self._stop.wait(SETTLE_S)
        from fractional_gpu.protocol.limits import PULSE_S  # noqa: PLC0415 - off the kernel's start
        from fractional_gpu.protocol.messages import GateAnswer  # noqa: PLC0415 - off the kernel's start

        client: BrokerClient | None = None
        while not self._stop.is_set():
            try:
                answer = self._answers.get(timeout=None if self._heard else PULSE_S)
            except Empty:
                answer = None if self._gate.is_open else (0, "pulse", "")
            if answer is not None:
                client = self._deliver(client, GateAnswer(number=answer[0], word=answer[1], detail=answer[2]))
        self._hang_up(client)

    def _deliver(self, client: "BrokerClient | None", answer: "GateAnswer") -> "BrokerClient | None":
        """Send one answer; return the connection for the next one."""
        from fractional_gpu.protocol.errors import FractionalGPUError  # noqa: PLC0415 - off the kernel's start

        why = ""
        for left in reversed(range(SEND_ATTEMPTS)):
            try:
                client = client or self._connect()
                client.answer(self._settings.lease_id, answer)
            except FractionalGPUError as error:
                self._hang_up(client)
                client = None
                if not is_local(error):
                    return None  # the broker that asked is gone, or no longer wants the answer; the next one asks again
                why = describe(error)
            except LOCAL_FAILURES as error:
                self._hang_up(client)
                client, why = None, describe(error)
            else:
                return client
            if left and self._stop.wait(SEND_AGAIN_S):
                return None
        self._tell_unheard(answer.number, why)
        return None

    def _tell_unheard(self, number: int, why: str) -> None:
        """Tell the user, once, that the broker's questions get no answer."""
        if number and not self._told_unheard:
            self._told_unheard = True
            self._notice(UNHEARD.format(why=why))
