"""The kernel's line to the broker: commands in, answers and pulses out.

Two daemon threads, started a moment after the kernel so that they take nothing from its start: one reads the stream of commands and
obeys at once what needs no round trip; the other sends the answers on a second connection. While the gate is not open it sends a pulse
every `PULSE_S` seconds, too, which proves that Python runs, to a broker that does not hear by itself whether its stream is read. A
broken stream is tried again with growing pauses, and what a process short of threads or descriptors cannot do is answered with "busy":
without this line the kernel would be deaf. It never starts a broker: a kernel that nobody uses needs none, and a cell that waits starts
one itself.
"""

import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from kernelext.gate import Gate
from kernelext.settings import Settings
from kernelext.shrink import Shrinker

if TYPE_CHECKING:
    from provisioner.client import BrokerClient
    from provisioner.protocol.messages import GateCommand

__all__ = ["Link"]

SETTLE_S = 0.1  # the kernel's own start comes first
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
LONGEST_PAUSE_UNKNOWN_S = (
    30.0  # the broker answers, but does not know (or want) this lease: nothing is likely to change soon
)


class Link:
    """One kernel's line. `notice` takes a sentence to show; `limit` the variables of a lease that has another size now.

    `managed` returns why the process cannot be saved, as far as is known by now.
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
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._shrinker = shrinker
        self._notice = notice
        self._limit = limit
        self._managed = managed
        self._stop = threading.Event()
        self._answers: SimpleQueue[tuple[int, str, str] | None] = SimpleQueue()  # number, word, detail; None: wake up
        self._clients: list[BrokerClient] = []
        self._heard = False  # the broker knows by itself that Python runs

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

    def exempt(self, on: bool) -> None:
        """Tell that the cell that begins does not use the GPU, or that it is over, so that it gets no ticket. Never blocks."""
        if not on:
            self._answers.put((0, "done", ""))
        elif not self._gate.is_open:
            self._answers.put((0, "exempt", ""))

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
        from provisioner.protocol.errors import BrokerUnavailableError, FractionalGPUError  # noqa: PLC0415 - off the kernel's start

        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            longest = LONGEST_PAUSE_S
            try:
                heard = self._listen()
                pause = FIRST_PAUSE_S if heard else pause
            except (BrokerUnavailableError, RuntimeError, OSError):
                pass  # nobody there, or gone, or this process is out of threads or descriptors: try again
            except FractionalGPUError:
                longest = LONGEST_PAUSE_UNKNOWN_S
            self._stop.wait(pause)
            pause = min(pause * 2, longest)

    def _listen(self) -> bool:
        """Obey one stream until it ends; returns whether anything came. Raises FractionalGPUError if it broke before the first line."""
        from provisioner import __version__  # noqa: PLC0415 - off the kernel's start
        from provisioner.protocol.errors import BrokerUnavailableError  # noqa: PLC0415 - off the kernel's start
        from provisioner.protocol.messages import GateHello  # noqa: PLC0415 - off the kernel's start

        heard = False
        client = self._connect()
        try:
            hello = GateHello(
                version=__version__, open=self._gate.is_open, busy=self._gate.is_busy, managed=self._managed()
            )
            for number, command in enumerate(client.gate(self._settings.lease_id, hello)):
                heard = heard or bool(
                    number or command.verb
                )  # not its greeting: whoever says no more may be gone at once
                self._heard = self._heard or command.hears
                self._try_to_obey(command)
        except BrokerUnavailableError:
            if not heard:
                raise
        finally:
            self._hang_up(client)
            if self._heard:  # the next one may be another version
                self._heard = False
                self._answers.put(None)
        return heard

    def _try_to_obey(self, command: "GateCommand") -> None:
        """Obey; a process that is out of threads or descriptors, or whose main loop is closed, says so instead."""
        try:
            self._obey(command)
        except (RuntimeError, OSError) as error:
            self._answer(command.number, "busy", f"this kernel could not do it: {error}"[:200])

    def _obey(self, command: "GateCommand") -> None:
        from provisioner.protocol.messages import GateVerb  # noqa: PLC0415 - off the kernel's start

        number = command.number
        match command.verb:
            case "":
                return
            case GateVerb.CLOSE:
                self._answer(number, self._gate.close())
            case GateVerb.PREEMPT:
                self._answer(number, self._gate.preempt())
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

    def _answer(self, number: int, word: str, detail: str = "") -> None:
        if number:  # 0: nobody waits for an answer
            self._answers.put((number, word, detail))

    def _send(self) -> None:
        self._stop.wait(SETTLE_S)
        from provisioner.protocol.errors import FractionalGPUError  # noqa: PLC0415 - off the kernel's start
        from provisioner.protocol.limits import PULSE_S  # noqa: PLC0415 - off the kernel's start
        from provisioner.protocol.messages import GateAnswer  # noqa: PLC0415 - off the kernel's start

        client: BrokerClient | None = None
        while not self._stop.is_set():
            try:
                answer = self._answers.get(timeout=None if self._heard else PULSE_S)
            except Empty:
                answer = None if self._gate.is_open else (0, "pulse", "")
            if answer is None:
                continue
            number, word, detail = answer
            try:
                client = client or self._connect()
                client.answer(self._settings.lease_id, GateAnswer(number=number, word=word, detail=detail))
            except FractionalGPUError:
                # The broker that asked is gone, or no longer wants the answer; the next one asks again.
                self._hang_up(client)
                client = None
        self._hang_up(client)
