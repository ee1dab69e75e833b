"""The kernel's channel to the broker. It receives commands and sends answers.

Two daemon threads start a moment after the kernel, so as not to slow down its startup:

- `gpu-gate` reads the commands and immediately carries out those that need no round trip.
- `gpu-answers` sends the answers on a second connection.

If the stream breaks, it is reopened after increasingly long pauses, even if a cell has damaged this process (`settings.LOCAL_FAILURES`). A
command that cannot be carried out is answered with "busy". The channel never starts a broker; waiting cells do that.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from fractional_gpu_kernel.memory import shrink
from fractional_gpu_kernel.settings import LOCAL_FAILURES, describe, is_local

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient
    from fractional_gpu.protocol.messages import GateAnswer, GateCommand
    from fractional_gpu_kernel.extension import LeasedKernel

SETTLE_S = 0.1  # the kernel starts first
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
SEND_AGAIN_S = 0.2
SEND_ATTEMPTS = 10  # they take about as long as the broker waits
UNHEARD = (
    "This kernel cannot respond to the GPU broker ({why}). Nothing is lost: while the kernel is idle, the broker may move its GPU memory "
    "to host memory after a short wait; the next cell gets it back."
)
LONGEST_PAUSE_UNKNOWN_S = 30.0  # the broker does not know or refuses this lease, which rarely changes


class BrokerChannel:
    def __init__(self, kernel: "LeasedKernel") -> None:
        self._kernel = kernel
        self._settings = kernel.settings
        self._gate = kernel.gate
        self._stop = threading.Event()
        # An answer has a number, a word and a detail. None only wakes up the thread.
        self._answers: SimpleQueue[tuple[int, str, str] | None] = SimpleQueue()
        self._clients: list[BrokerClient] = []
        self.is_connected = False  # whether the broker's commands arrive
        self._has_warned = False

    def start(self) -> None:
        threading.Thread(target=self._read, name="gpu-gate", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._answers.put(None)
        for client in list(self._clients):
            client.close()

    def report_exempt(self, on: bool) -> None:
        """Report that a cell that runs without the GPU has started or ended. The broker files no ticket for such a cell."""
        if not on and not self._gate.is_exempt:
            self._answers.put((0, "done", ""))
        elif on:
            self._repeat_exempt()

    def _repeat_exempt(self) -> None:
        """Repeat the report if only cells without the GPU are running. Send nothing while the gate is open, as no ticket is needed then."""
        if self._gate.is_exempt and not self._gate.is_open:
            self._answers.put((0, "exempt", ""))

    def report_inputs(self, requests: Sequence[str]) -> None:
        self._answers.put((0, "input", " ".join(requests)))

    def report_managed(self, sentence: str) -> None:
        self._answers.put((0, "managed", sentence))

    def _connect(self) -> "BrokerClient":
        client = self._settings.connect()
        self._clients.append(client)
        if self._stop.is_set():
            client.close()
        return client

    def _discard(self, client: "BrokerClient | None") -> None:
        if client is not None:
            client.close()
            if client in self._clients:
                self._clients.remove(client)

    def _read(self) -> None:
        self._stop.wait(SETTLE_S)
        from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError  # noqa: PLC0415 - off the kernel's start
        from fractional_gpu.protocol.names import check_msgspec  # noqa: PLC0415 - off the kernel's start

        try:
            check_msgspec()
        except BrokerUnavailableError as error:  # a waiting cell shows this error, too
            self._kernel.notices.add(f"{error}.")
            return
        pause = FIRST_PAUSE_S
        sender: threading.Thread | None = None
        while not self._stop.is_set():
            longest = LONGEST_PAUSE_S
            try:
                if sender is None:
                    thread = threading.Thread(target=self._send, name="gpu-answers", daemon=True)
                    thread.start()
                    sender = thread
                got_command = self._follow()
                pause = FIRST_PAUSE_S if got_command else pause
            except FractionalGPUError as error:
                if not (isinstance(error, BrokerUnavailableError) or is_local(error)):
                    longest = LONGEST_PAUSE_UNKNOWN_S
            except LOCAL_FAILURES:
                pass  # this process cannot make calls, which a waiting cell shows
            self._stop.wait(pause)
            pause = min(pause * 2, longest)

    def _follow(self) -> bool:
        from fractional_gpu import __version__  # noqa: PLC0415 - off the kernel's start
        from fractional_gpu.protocol.errors import BrokerUnavailableError  # noqa: PLC0415 - off the kernel's start
        from fractional_gpu.protocol.messages import GateHello  # noqa: PLC0415 - off the kernel's start

        got_command = False
        client = self._connect()
        try:
            hello = GateHello(
                version=__version__,
                open=self._gate.is_open,
                busy=self._gate.is_busy,
                managed=self._kernel.blockers.seen,
                inputs=self._kernel.inputs.waiting,
            )
            for number, command in enumerate(client.gate(self._settings.lease_id, hello)):
                self.is_connected = True
                if not number:
                    self._repeat_exempt()  # this broker does not know it yet
                # The greeting does not count, because a broker that sends nothing else may fail again immediately.
                got_command = got_command or bool(number or command.verb)
                try:
                    self._obey(command)
                except LOCAL_FAILURES as error:  # no threads or descriptors, a closed main loop, or replaced functions
                    self._answer(command.number, "busy", f"this kernel could not do it: {describe(error)}"[:200])
                with suppress(*LOCAL_FAILURES):  # a failure here must not end the stream
                    self._settings.restore_token_file()
        except BrokerUnavailableError:
            if not got_command:
                raise
        finally:
            self.is_connected = False
            self._discard(client)
        return got_command

    def _obey(self, command: "GateCommand") -> None:
        from fractional_gpu.protocol.messages import CELL_RUNS, NO_CELL_RUNS, GateVerb  # noqa: PLC0415 - off the kernel's start

        number = command.number
        match command.verb:
            case "":
                self._kernel.loop_watch.look()
            case GateVerb.CLOSE:
                self._answer(number, self._gate.close())
                self._repeat_exempt()
            case GateVerb.PREEMPT:
                word, cells = self._gate.preempt(), CELL_RUNS if self._gate.is_running else NO_CELL_RUNS
                self._answer(number, word, cells)
                self._repeat_exempt()
                if number and cells == CELL_RUNS:  # if there is no number, only the next cell requests the GPU
                    self._kernel.turns.show()
            case GateVerb.LIMIT:
                self._kernel.take_size(command.environment)
                self._answer(number, "done")
            case GateVerb.OPEN:
                self._gate.open(command.environment)
                self._answer(number, "open")
            case GateVerb.SHRINK:
                shrink(self._kernel, lambda word, detail: self._answer(number, word, detail))
            case GateVerb.NOTICE:
                if command.urgent:
                    self._kernel.notices.add_urgent(command.sentence, command.topic)
                else:
                    self._kernel.notices.add(command.sentence)
                self._answer(number, "done")
            case _:
                self._answer(number, "busy", f"this kernel's extension does not know the command {command.verb[:50]!r}")

    def _answer(self, number: int, word: str, detail: str = "") -> None:
        if number:  # with 0, the broker expects no answer
            self._answers.put((number, word, detail))

    def _send(self) -> None:
        from fractional_gpu.protocol.messages import GateAnswer  # noqa: PLC0415 - off the kernel's start

        client: BrokerClient | None = None
        while not self._stop.is_set():
            if (answer := self._answers.get()) is not None:
                client = self._deliver(client, GateAnswer(number=answer[0], word=answer[1], detail=answer[2]))
        self._discard(client)

    def _deliver(self, client: "BrokerClient | None", answer: "GateAnswer") -> "BrokerClient | None":
        from fractional_gpu.protocol.errors import FractionalGPUError  # noqa: PLC0415 - off the kernel's start

        why = ""
        for left in reversed(range(SEND_ATTEMPTS)):
            try:
                client = client or self._connect()
                client.answer(self._settings.lease_id, answer)
            except FractionalGPUError as error:
                self._discard(client)
                client = None
                if not is_local(error):  # the broker is gone or no longer wants the answer
                    return None
                why = describe(error)
            except LOCAL_FAILURES as error:
                self._discard(client)
                client, why = None, describe(error)
            else:
                return client
            if left and self._stop.wait(SEND_AGAIN_S):
                return None
        if answer.number and not self._has_warned:
            self._has_warned = True
            self._kernel.notices.add(UNHEARD.format(why=why))
        return None
