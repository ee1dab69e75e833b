"""What was learnt outlives the broker, and what cannot be understood of it is no reason not to start."""

import json
import logging
from pathlib import Path

import pytest

from fractional_gpu.broker.persistence.ledger_writer import (
    LedgerWriter,
    load_context_sizes,
    load_forecasts,
    save_forecasts,
)
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.forecasts.sizes import ContextSize, ContextSizes
from fractional_gpu.ledger.ledger import Ledger


def experienced() -> Forecasts:
    forecasts = Forecasts()
    for _ in range(50):
        forecasts.swap_finished("suspend", "G", 1000, 9_000)
    return forecasts


async def test_swaps_that_were_seen_are_remembered_by_the_next_broker(tmp_path: Path) -> None:
    forecasts = experienced()
    writer = LedgerWriter(Ledger.open(tmp_path / "ledger.sqlite"))
    contexts = ContextSizes()
    contexts.saw("G", "kernel", ContextSize(1000, 900), 20_000)
    save_forecasts(Arbiter(forecasts=forecasts), contexts, writer)
    await writer.close()
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        again = load_forecasts(ledger)
        assert load_context_sizes(ledger).estimate_mib("G", 1000) == 928
    assert again.swap_ms("suspend", "G", 1000) == forecasts.swap_ms("suspend", "G", 1000)
    assert again.swap_ms("suspend", "G", 1000) != Forecasts().swap_ms("suspend", "G", 1000)


@pytest.mark.parametrize("kept", ["", "{", "[]", "7", '{"version": 99}', json.dumps({"version": 1, "swaps": 3})])
def test_what_cannot_be_understood_is_forgotten_with_a_word(
    tmp_path: Path, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.keep("forecasts", kept)
        ledger.keep("contexts", kept)
        with caplog.at_level(logging.WARNING):
            fresh = load_forecasts(ledger)
            assert load_context_sizes(ledger).state() == ContextSizes().state()
    assert fresh.swap_ms("suspend", "G", 1000) == Forecasts().swap_ms("suspend", "G", 1000)
    assert caplog.text.count("saved forecasts cannot be used") == 2


def test_a_first_broker_begins_with_what_is_known_of_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert load_forecasts(ledger).state() == Forecasts().state()
        assert load_context_sizes(ledger).estimate_mib("G", 1000) == 512
    assert caplog.text == ""
