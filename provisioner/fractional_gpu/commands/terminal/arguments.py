"""Checks that several commands make first: of the simulated devices that were asked for, and of packages that an extra brings."""

import importlib.util

from fractional_gpu.commands.terminal.errors import CommandError, UsageError
from fractional_gpu.gpu.simulated.host import parse_devices
from fractional_gpu.gpu.simulated.store import SimulatedHostError


def require_packages(*names: str) -> None:
    """Raise CommandError if one of the packages is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"this needs {' and '.join(missing)}: pip install 'jupyter-fractional-gpu[lab]'")


def checked_simulate(text: str | None) -> str | None:
    """Return the text. Raises UsageError if it does not describe simulated devices."""
    if text is not None:
        try:
            parse_devices(text)
        except SimulatedHostError as error:
            raise UsageError(str(error)) from error
    return text
