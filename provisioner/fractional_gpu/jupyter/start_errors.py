"""The error with which a kernel's first start ends, in a form that web servers understand.

jupyter_server and jupyter_kernel_gateway answer an exception of somebody else's class with "500 Unhandled error", and its text stays in
the log. Only a `tornado.web.HTTPError` reaches the browser: `POST /api/kernels` then answers with its status and its message.
`POST /api/sessions` (the start of a notebook) and `PATCH /api/sessions` (a change of its kernel) answer with 500 and 501 for every
exception, and with its `str()`. So an error that is raised here is both: the project's own error, which callers catch by its class, and an
HTTPError whose `str()` is the sentence alone.
"""

from collections.abc import Callable

from tornado.web import HTTPError

from fractional_gpu.protocol.errors import FractionalGPUError

__all__ = ["sentence", "start_error"]

# The broker's verdict about this server. From this server's mouth they would speak of the browser's login, path or request.
_ABOUT_THE_SERVER = frozenset({401, 403, 404, 413})

_Factory = Callable[[str, str], FractionalGPUError]  # takes the sentence and the reason
_classes: dict[type[FractionalGPUError], _Factory] = {}


def start_error(error: FractionalGPUError, prefix: str = "") -> FractionalGPUError:
    """Return an error of the same class and reason, with `prefix` before its sentence, that is also an HTTPError."""
    return _class_for(type(error))(f"{prefix}{sentence(error)}", error.reason)


def sentence(error: FractionalGPUError) -> str:
    """Return the message on one line and without percent signs, which JupyterLab's dialog shows doubled."""
    return " ".join(str(error).replace("%", " percent").split()).removesuffix(".")


def _class_for(kind: type[FractionalGPUError]) -> _Factory:
    if kind not in _classes:
        _classes[kind] = _make_class(kind)
    return _classes[kind]


def _make_class(kind: type[FractionalGPUError]) -> _Factory:
    status = 500 if kind.status in _ABOUT_THE_SERVER else kind.status

    class StartError(kind, HTTPError):  # type: ignore[misc, valid-type] # the class is known at run time only
        def __init__(self, message: str, reason: str) -> None:
            HTTPError.__init__(self, status, message)
            self.reason = reason  # the reply's status line has it, too: "409 no-room"
            self._sentence = message

        def __str__(self) -> str:
            return self._sentence

        def __reduce__(self) -> tuple[Callable[..., FractionalGPUError], tuple[object, ...]]:
            return _rebuild, (kind, self._sentence, self.reason)  # a process pool cannot find this class by its name

    StartError.__module__, StartError.__qualname__ = kind.__module__, kind.__qualname__
    StartError.__name__ = kind.__name__
    return StartError


def _rebuild(kind: type[FractionalGPUError], message: str, reason: str) -> FractionalGPUError:
    return _class_for(kind)(message, reason)
