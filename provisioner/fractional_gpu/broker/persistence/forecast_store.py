"""What has been learnt, over restarts: kept in the ledger now and then, and when the broker ends.

It is no record of what is true: where it cannot be read, the next broker begins with its priors, and says so in the log.
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
    """Return what an earlier arbiter learnt, or the priors. Raises LedgerError."""
    return _read(ledger, _FORECASTS, Forecasts.from_state) or Forecasts()


def load_context_sizes(ledger: Ledger) -> ContextSizes:
    """Return what an earlier broker learnt of contexts, or nothing yet. Raises LedgerError."""
    return _read(ledger, _CONTEXTS, ContextSizes.from_state) or ContextSizes()


def save_forecasts(arbiter: Arbiter, contexts: ContextSizes, writer: LedgerWriter) -> None:
    """Hand what was learnt over to be written."""
    for name, state in ((_FORECASTS, arbiter.forecasts.state()), (_CONTEXTS, contexts.state())):
        writer.submit(partial(writer.ledger.keep, name, json.dumps(state, separators=(",", ":"))))


async def save_forecasts_periodically(arbiter: Arbiter, contexts: ContextSizes, writer: LedgerWriter) -> None:
    """Keep what is learnt, every few minutes, until cancelled."""
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
        log.warning("what was learnt before is of no use any more: %s", error)
        return None
