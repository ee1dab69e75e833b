"""What the mixin expects of the spawner below it, for the type checker; when it runs, the spawner's own class stands there."""

# ruff: noqa: D102 -- they are documented by JupyterHub

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from traitlets.config import Configurable, LoggingConfigurable

__all__ = ["Below"]

if TYPE_CHECKING:

    class Below(LoggingConfigurable):
        """JupyterHub's Spawner, as far as the mixin uses it. Its own documentation says what each is."""

        user: Any
        hub: Any
        orm_spawner: Any
        name: str
        options_form: Any
        apply_user_options: Any
        user_options: dict[str, Any]
        start_timeout: int
        http_timeout: int
        _log_name: str

        async def get_options_form(self) -> str: ...
        def run_options_from_form(self, form_data: Mapping[str, list[str]]) -> dict[str, Any]: ...
        def options_from_query(self, query_data: Mapping[str, list[str]]) -> dict[str, Any]: ...
        async def start(self) -> Any: ...  # noqa: ANN401
        async def poll(self) -> int | None: ...
        def run_post_stop_hook(self) -> Any: ...  # noqa: ANN401
        def get_state(self) -> dict[str, Any]: ...
        def load_state(self, state: dict[str, Any]) -> None: ...
        def clear_state(self) -> None: ...
        def get_env(self) -> dict[str, str]: ...
        def get_args(self) -> list[str]: ...
        def progress(self) -> AsyncGenerator[dict[str, Any], None]: ...
else:
    Below = Configurable
