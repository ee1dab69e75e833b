"""Failures as a hub shows them: a reason for its metrics, a sentence for the API, and HTML for the page. JupyterHub 5 and 6."""

from html import escape

from tornado import web

from fractional_gpu.protocol.errors import FractionalGPUError

try:
    from jupyterhub.spawner import SpawnException
except ImportError:  # JupyterHub 5
    SpawnException = None

__all__ = ["spawn_error", "spawn_error_of"]

_STATUS = {
    "pool-group": 403,
    "user-limit": 403,
    "group-limit": 403,
    "pool-closed": 503,
    "pool-full": 503,
    "seat-queue": 503,
    "no-device": 503,
    "broker": 503,
}


class _SpawnError(web.HTTPError):
    """For JupyterHub 5, whose spawn page shows the exception's text."""

    def __str__(self) -> str:
        return str(getattr(self, "jupyterhub_message", super().__str__()))


def spawn_error(sentence: str, *, reason: str, hint: str = "") -> web.HTTPError:
    """Return the error that stops a spawn. `hint` is said on the page only."""
    status = _STATUS.get(reason, 400)
    said = f"{_capital(sentence)}." + (f" {hint}" if hint else "")
    html = f"<strong>Your server was not started.</strong> {escape(said)}"
    if SpawnException is not None:
        error: web.HTTPError = SpawnException(sentence, reason=reason, message_html=html, status_code=status)
    else:
        error = _SpawnError(status, "%s", sentence, reason=reason)
    # The page shows these in either version; without them it shows the exception's own text.
    error.jupyterhub_message = f"Your server was not started. {said}"  # type: ignore[attr-defined]
    error.jupyterhub_html_message = html  # type: ignore[attr-defined]
    return error


def spawn_error_of(error: FractionalGPUError) -> web.HTTPError:
    """Return the error that stops a spawn because the broker answered so, or not at all."""
    reason = "broker" if error.status >= 500 else error.reason
    return spawn_error(str(error), reason=reason)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:].rstrip(".")
