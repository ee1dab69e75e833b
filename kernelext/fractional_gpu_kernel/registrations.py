"""What the extension has registered in an IPython shell, and its removal.

Users and other extensions register magics, callbacks and wrappers of their own, before ours and after. `undo` leaves all of them in
place: where ours was replaced, nothing changes, and where ours was wrapped, the wrapper stays (our function beneath it must then pass
calls through). What ours had replaced is put back.
"""

from collections.abc import Callable
from typing import Any

_MISSING: Any = object()


class Registrations:
    def __init__(self, shell: Any) -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._undo: list[Callable[[], None]] = []

    def magic(self, function: Callable[..., Any], kind: str, name: str) -> None:
        magics = self._shell.magics_manager.magics[kind]
        before = magics.get(name, _MISSING)
        self._shell.register_magic_function(function, kind, name)

        def undo() -> None:
            if magics.get(name) == function:
                _put_back(before, lambda: magics.pop(name), lambda: magics.__setitem__(name, before))

        self._undo.append(undo)

    def callback(self, event: str, function: Callable[..., Any]) -> None:
        self._shell.events.register(event, function)

        def undo() -> None:
            if function in self._shell.events.callbacks[event]:
                self._shell.events.unregister(event, function)

        self._undo.append(undo)

    def item(self, items: list[Any], item: object) -> None:
        items.append(item)

        def undo() -> None:
            if item in items:
                items.remove(item)

        self._undo.append(undo)

    def method(self, name: str, function: Callable[..., Any]) -> None:
        own = vars(self._shell)
        before = own.get(name, _MISSING)
        setattr(self._shell, name, function)

        def undo() -> None:
            if own.get(name) is function:
                # Without a method of the instance the class's shows again.
                _put_back(before, lambda: delattr(self._shell, name), lambda: setattr(self._shell, name, before))

        self._undo.append(undo)

    def undo(self) -> None:
        """Remove what is still ours, the last first. A second call changes nothing."""
        while self._undo:
            self._undo.pop()()


def _put_back(before: object, remove: Callable[[], object], restore: Callable[[], None]) -> None:
    if before is _MISSING:
        remove()
    else:
        restore()
