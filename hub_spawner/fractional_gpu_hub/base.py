"""Code shared by all spawners that let users choose a GPU: user options, the spawn page, and startup progress.

Two subclasses get the GPU in different ways:

- With `mixin.FractionalGPUMixin`, the hub requests a seat from the machine's broker and then starts the server.
- With `engines.spawner.EngineGPUMixin`, the engine (Slurm or Kubernetes) chooses a node, and the node registers the allocation as a seat
  with its own broker.

`CUDA_VISIBLE_DEVICES` is empty in every server, because processes only get a GPU through a kernel's lease.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from traitlets import Bool, default
from traitlets.config import Configurable

from fractional_gpu.core.units import format_fraction
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.seats import Offers
from fractional_gpu_hub.options import FIELD, KEYS, Choice, OptionsError, gpu_form, options_of_form, parse_options
from fractional_gpu_hub.seats import ProgressLog, spawn_ended, spawn_error, spawn_failed

_Spawner: Any = Configurable  # the class of the spawner comes after the mixin
_SPEC_MANAGER = "fractional_gpu.SeatKernelSpecManager"


class GPUChoiceMixin(_Spawner):  # type: ignore[misc] # a spawner, untyped
    """A mixin that adds a GPU choice to a spawner. Subclasses define where the offers and seats come from."""

    _gpu_progress_below = True  # whether the spawner's own progress is shown after ours

    gpu_no_offers = "You cannot choose a GPU right now: the GPU broker is not responding. Try again in a moment."

    gpu_allow_without: Bool[bool, bool | int] = Bool(
        default_value=True,
        config=True,
        help="""Whether servers may be started without a GPU.

        Example: c.GPUChoiceMixin.gpu_allow_without = False
        """,
    )
    gpu_filter_kernels: Bool[bool, bool | int] = Bool(
        default_value=True,
        config=True,
        help="""Whether the launcher shows only kernels that fit in the server's share of a GPU.

        Example: c.GPUChoiceMixin.gpu_filter_kernels = False
        """,
    )

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - the spawner's
        super().__init__(**kwargs)
        self._gpu_progress = ProgressLog()

    @default("apply_user_options")
    def _gpu_apply_user_options_default(self) -> Any:  # noqa: ANN401 - a hook of JupyterHub
        return lambda spawner, options: spawner.gpu_choice(options)

    async def gpu_offers(self) -> Offers:
        """Return the pools and fractions this user can choose from. Raises FractionalGPUError."""
        raise NotImplementedError

    async def gpu_take(self, choice: Choice) -> None:
        """Get the chosen GPU share, or store the choice for `gpu_prepare`. Raises an HTTPError, which stops the spawn.

        If this call is cancelled, no share remains allocated.
        """
        raise NotImplementedError

    async def gpu_prepare(self) -> None:
        """Adjust the spawner's settings to match the choice. Called just before the server starts, even if the server has no GPU."""

    def _gpu_hub(self) -> str:
        return str(getattr(self.hub, "api_url", ""))

    def _gpu_groups(self) -> list[str]:
        return sorted(group.name for group in self.user.groups)

    def gpu_choice(self, options: object) -> Choice:
        try:
            choice = parse_options(options)
        except OptionsError as error:
            self.log.warning("Refused the user options of %s: %s", self._log_name, error)
            raise spawn_error(str(error), reason="gpu-options") from None
        if choice.without and not self.gpu_allow_without:
            raise spawn_error(
                "you chose a server without a GPU, but every server of this hub has a GPU; choose a fraction",
                reason="gpu-options",
            )
        return choice

    async def get_options_form(self) -> str:
        below = await super().get_options_form() or ""
        last = self.orm_spawner.user_options if self.orm_spawner is not None else None
        chosen, without = None, False
        with contextlib.suppress(OptionsError):
            choice = parse_options(last or {})
            without = choice.without
            if choice.pool is not None and choice.fraction_milli is not None:
                chosen = (choice.pool, choice.fraction_milli)
        offers, problem = None, ""
        try:
            offers = await self.gpu_offers()
        except FractionalGPUError as error:
            self.log.warning("The spawn page cannot offer GPUs: %s", error)
            problem = self.gpu_no_offers
        form = gpu_form(offers, chosen=chosen, without=without, allow_without=self.gpu_allow_without, problem=problem)
        return f"{below}\n{form}" if below else form

    def run_options_from_form(self, form_data: Mapping[str, list[str]]) -> dict[str, Any]:
        return self._gpu_options_of(form_data, super().run_options_from_form, {FIELD, "_xsrf"})

    def options_from_query(self, query_data: Mapping[str, list[str]]) -> dict[str, Any]:
        """Return the user options given in a link such as `/hub/spawn?opt-gpu=default/250`."""
        return self._gpu_options_of(query_data, super().options_from_query, {FIELD, *KEYS})

    def _gpu_options_of(
        self, form_data: Mapping[str, list[str]], read_below: Callable[[Any], Any], ours: set[str]
    ) -> dict[str, Any]:
        rest = {name: values for name, values in form_data.items() if name not in ours}
        try:
            return {**(read_below(rest) if rest else {}), **options_of_form(form_data)}
        except OptionsError as error:
            self.log.warning("Refused the spawn form of %s: %s", self._log_name, error)
            raise spawn_error(str(error), reason="gpu-options") from None

    def gpu_wanted(self, choice: Choice, offers: Offers) -> tuple[str, int]:
        """Return the pool and milli-GPU to request. Anything the user left out comes from the offer closest to the defaults.

        If the user chose nothing or no offer fits, the defaults are used. If those are refused later, the error lists what is on offer.
        Raises an HTTPError, which stops the spawn.
        """
        pool, milli = choice.pool or offers.default_pool, choice.fraction_milli or offers.default_fraction_milli
        asked = [
            (offer, [one for one in offer.fractions if choice.fraction_milli in {None, one.fraction_milli}])
            for offer in offers.pools
            if choice.pool in {None, offer.pool}
        ]
        can_have = [(offer.pool, one) for offer, ones in asked if not offer.why_not for one in ones if not one.why_not]
        if can_have and (choice.pool or choice.fraction_milli):
            # Prefer the default, then a share that is free, then a share with the default fraction or pool.
            found, one = min(
                can_have,
                key=lambda it: (
                    (it[0], it[1].fraction_milli) != (pool, milli),
                    not it[1].free,
                    it[1].fraction_milli != milli,
                    it[0] != pool,
                ),
            )
            return found, one.fraction_milli
        if not pool or not milli:
            whys = [offer.why_not or next((one.why_not for one in ones), "") for offer, ones in asked]
            nothing = (
                f"pool {choice.pool!r} is not available to you" if choice.pool else "no GPU pool is available to you"
            )
            why = "; ".join(dict.fromkeys(filter(None, whys))) or nothing
            raise spawn_error(f"{why}; choose a server without a GPU (fraction 'none')", reason="no-pool")
        return pool, milli

    async def start(self) -> Any:  # noqa: ANN401 - as the spawner below
        """Get the chosen GPU share, then start the server. If this fails or is cancelled, the hub's cleanup gives the share back."""
        try:
            choice = self.gpu_choice(self.user_options)
            if not choice.without:
                await self.gpu_take(choice)
            await self.gpu_prepare()
            started = await self._gpu_start_server()
        except BaseException as error:
            spawn_failed(error)
            raise
        else:
            spawn_ended("without" if choice.without else "gpu")
            return started
        finally:
            self._gpu_progress.close()

    async def _gpu_start_server(self) -> Any:  # noqa: ANN401 - as the spawner below
        self._gpu_progress.add(80, "Starting the server")
        return await super().start()

    def clear_state(self) -> None:
        """Clear the state and start the progress log afresh. The hub calls this before each start."""
        super().clear_state()
        self._gpu_progress.begin()

    def get_env(self) -> dict[str, str]:
        environment: dict[str, str] = super().get_env()
        environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment

    def get_args(self) -> list[str]:
        arguments: list[str] = list(super().get_args())
        if self.gpu_filter_kernels:
            arguments.append(f"--ServerApp.kernel_spec_manager_class={_SPEC_MANAGER}")
        return arguments

    async def progress(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield all progress events of the current start, then any that come from the spawner class this mixin was added to."""
        async with contextlib.aclosing(self._gpu_progress.follow()) as events:
            async for event in events:
                yield event
        if self._gpu_progress_below:
            async with contextlib.aclosing(super().progress()) as events:
                async for event in events:
                    yield event


def free_fractions(offers: Offers, *, without: bool = False) -> str:
    """Return a sentence listing the free shares and, if `without` is set, "a server without a GPU". Return "" if there are none."""
    free = [
        f"{format_fraction(one.fraction_milli)} GPU of pool {pool.pool}"
        for pool in offers.pools
        if not pool.why_not
        for one in pool.fractions
        if one.free
    ]
    free += ["a server without a GPU"] if without else []
    return f"Available now: {', '.join(free)}." if free else ""
