"""What the arbiter has learnt, over restarts: kept in the ledger now and then, and when the broker ends.

It is no record of what is true: where it cannot be read, the next arbiter begins with its priors, and says so in the log.
"""

import asyncio
import json
import logging
from functools import partial

from provisioner.broker.writer import LedgerWriter
from provisioner.core.arbiter import Arbiter
from provisioner.core.forecasts import Forecasts
from provisioner.ledger.ledger import Ledger

__all__ = ["keep_learning", "keep_learnt", "learnt"]

log = logging.getLogger(__name__)

_NAME = "forecasts"
_INTERVAL_S = 300.0


def learnt(ledger: Ledger) -> Forecasts:
    """Return what an earlier arbiter learnt, or the priors. Raises LedgerError."""
    text = ledger.kept(_NAME)
    if text is None:
        return Forecasts()
    try:
        return Forecasts.from_state(json.loads(text))
    except ValueError as error:
        log.warning("what was learnt before is of no use any more: %s", error)
        return Forecasts()


def keep_learnt(arbiter: Arbiter, writer: LedgerWriter) -> None:
    """Hand what was learnt over to be written."""
    writer.submit(partial(writer.ledger.keep, _NAME, json.dumps(arbiter.forecasts.state(), separators=(",", ":"))))


async def keep_learning(arbiter: Arbiter, writer: LedgerWriter) -> None:
    """Keep what is learnt, every few minutes, until cancelled."""
    while True:
        await asyncio.sleep(_INTERVAL_S)
        keep_learnt(arbiter, writer)
