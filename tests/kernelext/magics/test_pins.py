"""A standing pin is as long as the pool allows, is renewed, and ends with a message."""

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from fractional_gpu.protocol.errors import ConflictError
from fractional_gpu.protocol.status import LeaseStatus
from fractional_gpu_kernel.magics import actions
from fractional_gpu_kernel.magics.actions import TOO_LONG, StandingPin
from fractional_gpu_kernel.settings import Settings
from tests.kernelext.scripted_broker import LEASE, TOKEN, ScriptedBroker
from tests.kernelext.statuses import LEASE as STATUS

Said = SimpleQueue[str]


@pytest.fixture
def said() -> Said:
    return SimpleQueue()


@pytest.fixture
def pin(folder: Path, broker: ScriptedBroker, said: Said) -> Iterator[StandingPin]:
    (folder / "token").write_text(TOKEN)
    pin = StandingPin(Settings(LEASE, broker.path, str(folder / "token")), said.put)
    yield pin
    pin.stop()


def durations(broker: ScriptedBroker) -> list[int]:
    return [body["duration_ms"] for body in broker.bodies("pin")]


def test_it_takes_the_longest_that_is_allowed(pin: StandingPin) -> None:
    asked = []

    def first(duration_ms: int) -> LeaseStatus:
        asked.append(duration_ms)
        if duration_ms > 300_000:
            raise ConflictError("5 min at most", reason=TOO_LONG)
        return STATUS

    assert pin.start(first) is STATUS
    assert asked == [1_800_000, 900_000, 300_000]


@pytest.mark.parametrize("reason", [TOO_LONG, "pin-budget"])
def test_a_refusal_is_passed_on(pin: StandingPin, reason: str) -> None:
    def first(duration_ms: int) -> LeaseStatus:
        raise ConflictError(f"no {duration_ms}", reason=reason)

    with pytest.raises(ConflictError, match="no 60000" if reason == TOO_LONG else "no 1800000"):
        pin.start(first)


def test_it_is_renewed_until_the_broker_refuses_and_then_says_so(
    pin: StandingPin, broker: ScriptedBroker, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "_RENEW_AT", 1e-6)
    pin.start(lambda _: STATUS)
    broker.wait_for(lambda: len(durations(broker)) >= 3)
    assert set(durations(broker)) == {1_800_000}
    broker.fail["pin"] = ConflictError("the budget of 8 h a day is spent", reason="pin-budget")
    assert said.get(timeout=60) == "This kernel's pin is no longer being renewed: the budget of 8 h a day is spent"


def test_a_broker_that_is_away_is_asked_again(
    pin: StandingPin, broker: ScriptedBroker, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "_RENEW_AT", 1e-6)
    broker.hang_up["pin"] = 4
    pin.start(lambda _: STATUS)
    broker.wait_for(lambda: len(durations(broker)) >= 8)
    assert said.empty()


def test_a_stopped_one_asks_no_more(pin: StandingPin, broker: ScriptedBroker) -> None:
    pin.start(lambda _: STATUS)
    pin.stop()
    assert durations(broker) == []
