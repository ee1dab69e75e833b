"""Lets a cluster's engine, such as Slurm, allocate a server's GPU: `class S(EngineGPUMixin, AnEnginesSpawner): ...`.

- The engine chooses the node, whose agent or prolog registers the allocation as a seat with its broker. The hub never contacts a broker.
- Offers are based on the summaries that the nodes' agents publish through the engine. They reflect the last known state, so they are not
  guaranteed.
- `gpu_take` turns the user's choice into an `Allocation`, which each spawner's `gpu_prepare` turns into a request to the engine. No other
  user options reach the engine.
- While the request is queued, `gpu_queue` reports why it is waiting and when the wait is expected to end.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from traitlets import Float, TraitError, Unicode, default, validate

from fractional_gpu.core.units import format_fraction, format_memory, parse_memory_mib
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.nodes import STALE_S
from fractional_gpu.protocol.seats import Offers
from fractional_gpu_hub.base import GPUChoiceMixin, free_fractions
from fractional_gpu_hub.engines.offers import NodePool, Terms, host_memory_mib, offers_of, on_offer
from fractional_gpu_hub.options import Choice
from fractional_gpu_hub.seats import spawn_error, spawn_error_of

_STATE = "gpu_allocation"
_SERVER_START_S = 60  # the time for the server itself to start, after the engine has started it
_QUEUED, _MOST = 10, 60  # the progress bar while the engine queues the request


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What to request from the engine: milli-GPU, MiB of GPU memory, and MiB of host memory for the server and its saved GPU memory."""

    pool: str
    fraction_milli: int
    memory_mib: int
    host_memory_mib: int


class EngineGPUMixin(GPUChoiceMixin):
    """A mixin that adds a GPU choice to an engine's spawner. List it before the spawner class, and define `gpu_nodes` and `gpu_prepare`."""

    gpu_no_offers = "You cannot choose a GPU right now: the cluster is not reporting its GPUs. Try again in a moment."

    gpu_wait: Float[float, int | float] = Float(
        600.0,
        config=True,
        help="""How long a server waits in the engine's queue, in seconds. The default of `start_timeout` is a minute longer.

        Example: c.EngineGPUMixin.gpu_wait = 1800
        """,
    )
    gpu_base_memory: Unicode[str, str | bytes] = Unicode(
        "2GiB",
        config=True,
        help="""Host memory for a server, its kernels and their data. The hub requests this plus the share's GPU memory from the engine,
        because a suspended kernel's saved GPU memory counts as memory of its job or pod.

        Example: c.EngineGPUMixin.gpu_base_memory = "4GiB"
        """,
    )
    gpu_nodes_cache: Float[float, int | float] = Float(
        5.0,
        config=True,
        help="""How long spawn pages reuse the last data read from the nodes, in seconds.

        Example: c.EngineGPUMixin.gpu_nodes_cache = 15
        """,
    )
    gpu_stale_after: Float[float, int | float] = Float(
        float(STALE_S),
        config=True,
        help="""The age in seconds at which a node's summary counts as out of date. The spawn page then shows this age and offers no share
        of the node.

        Example: c.EngineGPUMixin.gpu_stale_after = 300
        """,
    )

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - the spawner's
        super().__init__(**kwargs)
        self._gpu_allocation: Allocation | None = None

    @default("start_timeout")
    def _gpu_start_timeout_default(self) -> int:
        return int(self.gpu_wait) + _SERVER_START_S

    @validate("gpu_base_memory")
    def _gpu_check_base_memory(self, proposal: dict[str, Any]) -> str:
        try:
            parse_memory_mib(proposal["value"])
        except ValueError as error:
            raise TraitError(f"c.EngineGPUMixin.gpu_base_memory: {error}") from None
        return str(proposal["value"])

    async def gpu_nodes(self) -> Sequence[NodePool]:
        """Return the pools of all nodes, as published by the nodes' agents. Raises EngineError."""
        raise NotImplementedError

    async def gpu_queue(self) -> AsyncGenerator[str, None]:
        """Yield a sentence each time the engine gives a new reason for the wait or a new expected start time.

        The caller closes the generator once the server has started.
        """
        nothing: tuple[str, ...] = ()
        for sentence in nothing:
            yield sentence

    @property
    def gpu_allocation(self) -> Allocation | None:
        return self._gpu_allocation

    async def gpu_offers(self) -> Offers:
        return offers_of(await self.gpu_nodes(), self._gpu_terms())

    def _gpu_terms(self) -> Terms:
        return Terms(now_s=time.time(), stale_after_s=self.gpu_stale_after)

    async def gpu_take(self, choice: Choice) -> None:
        """Check the choice against the offers, and store it for `gpu_prepare`. Raises an HTTPError, which stops the spawn."""
        if choice.memory_mib is not None:
            raise spawn_error(
                f"memory {format_memory(choice.memory_mib)} was chosen, but in this cluster the share determines the memory; leave "
                "memory out, or choose a larger fraction",
                reason="gpu-options",
            )
        try:
            nodes = await self.gpu_nodes()
        except FractionalGPUError as error:
            self.log.warning("%s did not get a GPU: %s", self._log_name, error)
            raise spawn_error_of(error) from error
        offers = offers_of(nodes, self._gpu_terms())
        pool, milli = self.gpu_wanted(choice, offers)
        offer = self._gpu_offer(offers, pool, milli)
        base_mib = parse_memory_mib(self.gpu_base_memory)
        self._gpu_allocation = Allocation(
            pool=pool,
            fraction_milli=milli,
            memory_mib=offer,
            host_memory_mib=host_memory_mib(nodes, pool, milli, base_mib=base_mib),
        )
        self._gpu_progress.add(5, f"Asking the cluster for {self._gpu_words()}")

    def _gpu_offer(self, offers: Offers, pool: str, milli: int) -> int:
        found = next((one for one in offers.pools if one.pool == pool), None)
        if found is None:
            raise spawn_error(f"no such pool: {pool!r}; available: {on_offer(offers, pool)}", reason="gpu-options")
        if found.why_not:
            raise spawn_error(f"pool {pool}: {found.why_not}", reason="no-device", hint=free_fractions(offers))
        for one in found.fractions:
            if one.fraction_milli == milli:
                return one.memory_mib
        raise spawn_error(
            f"{format_fraction(milli)} GPU is not available in pool {pool}; available: {on_offer(offers, pool)}",
            reason="gpu-options",
        )

    def _gpu_words(self) -> str:
        has = self._gpu_allocation
        return f"{format_fraction(has.fraction_milli)} GPU of pool {has.pool}" if has is not None else "no GPU"

    async def _gpu_start_server(self) -> Any:  # noqa: ANN401 - as the spawner below
        follower = asyncio.ensure_future(self._gpu_follow_queue())
        try:
            started = await super()._gpu_start_server()
        finally:
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await follower
        self._gpu_progress.add(90, f"The cluster has started your server, with {self._gpu_words()}")
        return started

    async def _gpu_follow_queue(self) -> None:
        """Show the user why the request is waiting. Failures are only logged, because the server can start anyway."""
        try:
            async with contextlib.aclosing(self.gpu_queue()) as sentences:
                async for sentence in sentences:
                    self._gpu_progress.add(min(_MOST, _QUEUED + self._gpu_progress.count), sentence)
        except FractionalGPUError as error:
            self.log.warning("Could not read the queue information for %s: %s", self._log_name, error)

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = super().get_state()
        if self._gpu_allocation is not None:
            state[_STATE] = asdict(self._gpu_allocation)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        saved = state.get(_STATE)
        # If another version saved the state, the server continues, but its share is not shown.
        with contextlib.suppress(TypeError):
            self._gpu_allocation = Allocation(**saved) if isinstance(saved, dict) else None

    def clear_state(self) -> None:
        super().clear_state()
        self._gpu_allocation = None
