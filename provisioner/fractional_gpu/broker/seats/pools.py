"""Lists and changes the keys of pools while the broker runs.

- A change has the form of the configuration and passes the same parser: a wrong value changes nothing.
- It applies at once: existing leases and seats get the new idle times, preemption, residency, limits and priorities, too. They keep
  their size, seat, place in the queue and pool, even if the changed pool would no longer give them.
- It lasts until the broker restarts; a permanent change belongs into the configuration. Only the configuration assigns devices.
"""

import logging
from collections.abc import Callable
from typing import Any

from fractional_gpu.broker.broker import Broker, now_ms
from fractional_gpu.config.keys import ConfigError
from fractional_gpu.config.pools import ALL_KEYS, PoolSettings, parse_pool
from fractional_gpu.config.settings import Settings
from fractional_gpu.core.events import PoolConfigured
from fractional_gpu.core.model import PoolSpec
from fractional_gpu.protocol.errors import BadRequestError, NotFoundError
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.seats import PoolChange, PoolKeys, PoolList

__all__ = ["PoolEditor"]

log = logging.getLogger(__name__)


class PoolEditor:
    """The pools of one broker; for its loop. `changed` is called with each changed pool.

    `note` returns a sentence that administrators should read about a pool, or "".
    """

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        changed: Callable[[PoolSettings], None],
        note: Callable[[PoolSpec], str],
    ) -> None:
        self._broker = broker
        self._configured = {pool.name: pool for pool in settings.pools}
        self._pools = dict(self._configured)
        self._changed = changed
        self._note = note

    def listing(self) -> PoolList:
        """Return the present keys of all pools."""
        return PoolList(pools=[self._keys(pool) for _, pool in sorted(self._pools.items())])

    def change(self, name: str, change: PoolChange, *, uid: int) -> PoolKeys:
        """Change keys of a pool. Raises NotFoundError, or BadRequestError with the key, the value and the allowed form."""
        pool = self._pools.get(name)
        if pool is None:
            names = ", ".join(sorted(self._pools))
            raise NotFoundError(f"there is no pool {name[:MAX_NAME]!r}; pools: {names}", reason="unknown-pool")
        if "devices" in change.keys:
            raise BadRequestError(
                "devices cannot be changed while the broker runs: change the configuration and start the broker again "
                "(`jupyter gpu drain` empties a device)",
                reason="devices",
            )
        try:
            fresh = parse_pool("pools", name, {**pool.raw, **change.keys})
        except ConfigError as error:
            raise BadRequestError(str(error), reason="bad-pool") from None
        if not change.keys:
            return self._keys(pool)
        spec = self._broker.arbiter.pools()[name]
        self._pools[name] = fresh
        log.warning("pool %r was changed by uid %d: %s", name, uid, ", ".join(sorted(change.keys)))
        self._broker.dispatch(PoolConfigured(at_ms=now_ms(), pool=fresh.spec(spec.devices)))
        self._changed(fresh)
        return self._keys(fresh)

    def _keys(self, pool: PoolSettings) -> PoolKeys:
        now = _effective(pool)
        configured = _effective(self._configured[pool.name])
        spec = self._broker.arbiter.pools().get(pool.name)
        return PoolKeys(
            pool=pool.name,
            devices=list(spec.devices) if spec is not None else [],
            keys=now,
            changed=sorted(key for key in now if now[key] != configured[key]),
            note=self._note(spec) if spec is not None else "",
        )


def _effective(pool: PoolSettings) -> dict[str, Any]:
    return {key: pool.raw.get(key, rule.default) for key, rule in ALL_KEYS.items() if key != "devices"}
