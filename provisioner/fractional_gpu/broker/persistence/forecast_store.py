"""Saves forecasts and sizes of CUDA contexts in the ledger every few minutes and at the broker's end, and loads them at its start.

They are estimates: if they cannot be read, the broker starts with its priors and logs that.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.forecasts.context_sizes import ContextSizes
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.ledger.ledger import Ledger

__all__ = ["load_context_sizes", "load_forecasts", "save_forecasts", "save_forecasts_periodically"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_FORECASTS, _CONTEXTS = "forecasts", "contexts"
_INTERVAL_S = 300.0


def load_forecasts(ledger: Ledger) -> Forecasts:
    """Return the forecasts of an earlier arbiter, or the priors. Raises LedgerError."""
    return _read(ledger, _FORECASTS, Forecasts.from_state) or Forecasts()


def load_context_sizes(ledger: Ledger) -> ContextSizes:
    """Return the context sizes that an earlier broker learned, or empty ones. Raises LedgerError."""
    return _read(ledger, _CONTEXTS, ContextSizes.from_state) or ContextSizes()


def save_forecasts(arbiter: Arbiter, contexts: ContextSizes, writer: LedgerWriter) -> None:
    """Submit forecasts and context sizes to be written."""
    for name, state in ((_FORECASTS, arbiter.forecasts.state()), (_CONTEXTS, contexts.state())):
        writer.submit(partial(writer.ledger.keep, name, json.dumps(state, separators=(",", ":"))))


async def save_forecasts_periodically(arbiter: Arbiter, contexts: ContextSizes, writer: LedgerWriter) -> None:
    """Save every `_INTERVAL_S` until cancelled."""
    while True:
        await asyncio.sleep(_INTERVAL_S)
        save_forecasts(arbiter, contexts, writer)


def _read(ledger: Ledger, name: str, understand: Callable[[object], T]) -> T | None:
    text = ledger.kept(name)
    if text is None:
        return None
    try:
        return understand(json.loads(text))
    except ValueError as error:
        log.warning("saved forecasts cannot be used: %s", error)
        return None
