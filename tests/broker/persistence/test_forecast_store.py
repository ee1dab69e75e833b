"""Learnt forecasts outlive the broker, and unreadable ones do not stop it from starting."""

import json
import logging
from pathlib import Path

import pytest

from fractional_gpu.broker.kernels.context_sizes import MOST_MIB, ContextSize, ContextSizes
from fractional_gpu.broker.persistence.ledger_writer import (
    LedgerWriter,
    load_context_sizes,
    load_forecasts,
    read_learnt,
    save_forecasts,
)
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.forecasts.forecasts import Forecasts, Neighbours
from fractional_gpu.core.model import Sign
from fractional_gpu.ledger.ledger import Ledger


def experienced() -> Forecasts:
    """Return forecasts with data in each part."""
    forecasts, alone = Forecasts(), Neighbours("G", 0, 1_000, None)
    for number in range(50):
        forecasts.swap_finished("suspend", "G", 1000, 9_000)
        forecasts.wait_ended(forecasts.wait_span("busy", 40_000), 3_000 * number)
        forecasts.cell_began("a", 200_000 * number, "G")
        forecasts.cell_ended("a", 200_000 * number + 7_000)
        forecasts.learn_slowdown("a", alone, 10_000 + number, ended_alone=True)
        beside = Neighbours("G", 1, 1_500, forecasts.slowdown_span("G", 1, 1_500))
        forecasts.learn_slowdown("a", beside, 17_000, ended_alone=False)
        forecasts.hold_seen("p", 10 * number, 10**9)
        forecasts.asked("p", 100, 1 + number % 2)
        forecasts.demand_seen("a", "p", 800)
        forecasts.sign_settled("a", Sign.FOCUS, true=True)
    return forecasts


async def test_what_was_learnt_is_remembered_by_the_next_broker(tmp_path: Path) -> None:
    forecasts = experienced()
    writer = LedgerWriter(Ledger.open(tmp_path / "ledger.sqlite"))
    contexts = ContextSizes()
    contexts.saw("G", "kernel", ContextSize(1000, 900), 20_000)
    save_forecasts(Arbiter(forecasts=forecasts), contexts, writer)
    await writer.close()
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        again = load_forecasts(ledger)
        assert load_context_sizes(ledger) == contexts
    assert again == forecasts != Forecasts()
    assert again.swap_span("suspend", "G", 1000) == forecasts.swap_span("suspend", "G", 1000)
    assert again.wait_span("busy", 9_000) == forecasts.wait_span("busy", 9_000)
    assert again.slowdown_span("G", 1, 1_500) == forecasts.slowdown_span("G", 1, 1_500)
    assert again.next_cell_ms("a") == forecasts.next_cell_ms("a")
    assert again.asks("p").usable(350) == forecasts.asks("p").usable(350) > 0
    assert again.errors() == forecasts.errors()


@pytest.mark.parametrize("kept", ["", "{", "[]", "7", '{"version": 99}', json.dumps({"version": 1, "swaps": 3})])
def test_what_cannot_be_understood_is_forgotten_with_a_word(
    tmp_path: Path, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.keep("forecasts", kept)
        ledger.keep("contexts", kept)
        with caplog.at_level(logging.WARNING):
            assert load_forecasts(ledger) == Forecasts()
            assert load_context_sizes(ledger) == ContextSizes()
    assert caplog.text.count("cannot use saved forecasts") == 2


@pytest.mark.parametrize(
    ("part", "damaged"),
    [
        ("swaps", {"suspend d": [5]}),
        ("swaps", {"suspend d": [[5, float("nan")]]}),
        ("gaps", "many"),
        ("gaps", {"common": [0, -5]}),
        ("alone", {"a": 5}),
        ("holds", {"p": [1]}),
        ("demands", {"first_milli": 300, "own": {"p": {}}}),
        ("ratios", {"swap 3": ["soon"]}),
        ("ratios", {"1 G": [True]}),
        ("bands", {"resume G": {"low": {"factor": -1}}}),
        ("asked_sizes", {"p": [[1, 0.5]]}),
    ],
)
def test_damaged_forecasts_are_refused(part: str, damaged: object) -> None:
    with pytest.raises(ValueError, match=r"expected|Expected|missing"):
        read_learnt(json.dumps({part: damaged}), Forecasts)


def test_numbers_that_fit_but_make_no_sense_do_no_harm() -> None:
    odd = {
        "bands": {"resume G": {"low": {"factor": 10**9, "run": 10**9}, "high": {"factor": 0}}},
        "cells": {"common": []},
        "asked_sizes": {"p": {"recent": [[0, 1], [1, 0]]}},
        "demands": {"first_milli": 300, "own": {"a": {"value": 5, "count": 0}}},
        "holds": {"p": {"lost": 1, "held": 0}},
    }
    forecasts = read_learnt(json.dumps(odd), Forecasts)
    stated = forecasts.swap_span("resume", "G", 4_000)
    assert 0 == stated.low_ms <= stated.expected_ms <= stated.high_ms
    assert forecasts.next_cell_ms("a") == 0
    assert forecasts.asks("p").usable(5) == 5
    assert forecasts.demand_seen("a", "p", 100) > 5
    assert forecasts.hold_rate("p") == 0


@pytest.mark.parametrize("size", [[1], ["me", 600], [1, -5]])
def test_damaged_context_sizes_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match=r"expected|Expected|missing"):
        read_learnt(json.dumps({"version": 2, "seen": {"G": {"k": size}}}), ContextSizes)


def test_a_damaged_size_is_no_larger_than_a_context_can_be() -> None:
    sizes = read_learnt('{"version": 2, "seen": {"G": {"k": [1000, 1000000000]}}}', ContextSizes)
    assert sizes.estimate_mib("G", 1000) == MOST_MIB


def test_a_first_broker_begins_with_what_is_known_of_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert load_forecasts(ledger) == Forecasts()
        assert load_context_sizes(ledger) == ContextSizes()
    assert caplog.text == ""
