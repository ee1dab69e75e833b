"""Errors sent over the socket. They share a base class. Each has a stable code, an HTTP status and a sentence that says what to do."""

from typing import ClassVar

RESTART = "restart the kernel, which loses its variables: save what you need first, in cells that begin with %%cpu"
"""The end of every message that tells a user to restart a kernel. It says what is lost."""


class FractionalGPUError(Exception):
    """The base class of all errors this project raises for its users. `reason` is more specific than the class's `code`."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or self.code


class BadRequestError(FractionalGPUError):
    """The request is malformed or not allowed. Sending it again won't help."""

    code = "bad-request"
    status = 400


class UnauthorizedError(FractionalGPUError):
    """The token is missing, or does not belong to the lease."""

    code = "unauthorized"
    status = 401


class ForbiddenError(FractionalGPUError):
    """The caller does not have permission for this request."""

    code = "forbidden"
    status = 403


class NotFoundError(FractionalGPUError):
    """There is no such lease, pool or route, or the caller may not see it."""

    code = "not-found"
    status = 404


class ConflictError(FractionalGPUError):
    """The lease's current state does not allow this request."""

    code = "conflict"
    status = 409


class RequestTooLargeError(FractionalGPUError):
    """The request exceeds a limit."""

    code = "too-large"
    status = 413


class TooManyRequestsError(FractionalGPUError):
    """A rate limit has been exceeded. The same request may succeed after `retry_s` seconds; our client waits and retries."""

    code = "too-many"
    status = 429

    def __init__(self, message: str, *, reason: str = "", retry_s: float = 1.0) -> None:
        super().__init__(message, reason=reason)
        self.retry_s = retry_s


class NoRoomError(FractionalGPUError):
    """No GPU has room at the moment. The message says what was requested, what is available and what to do."""

    code = "no-room"
    status = 409


class InternalBrokerError(FractionalGPUError):
    """The broker failed. Its log says why."""

    code = "internal"
    status = 500


class BrokerUnavailableError(FractionalGPUError):
    """No broker is responding, and none could be started. Clients raise this error themselves. It is never sent."""

    code = "broker-unavailable"
    status = 503


_BY_CODE = {kind.code: kind for kind in FractionalGPUError.__subclasses__()}


def error_from_reply(payload: object, status: int) -> FractionalGPUError:
    """Rebuild the error from a reply's JSON, `{"error": {"code", "reason", "message"}}`.

    Returns an InternalBrokerError if the reply has a different form.
    """
    error = payload.get("error") if isinstance(payload, dict) else None
    if not isinstance(error, dict):
        return InternalBrokerError(f"the broker answered {status} without an explanation; see its log")
    cls = _BY_CODE.get(str(error.get("code")), InternalBrokerError)
    return cls(str(error.get("message", "")), reason=str(error.get("reason", "")))
