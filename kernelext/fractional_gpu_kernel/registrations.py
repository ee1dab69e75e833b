"""Registers the extension's parts in an IPython shell, and removes them again.

`undo` restores the functions we replaced, but keeps any that users or other extensions have registered since. If our function has been
replaced, `undo` does nothing. If it has been wrapped, the wrapper stays, so our function must then pass calls through.
"""

from collections.abc import Callable, MutableMapping
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
        self._undo.append(lambda: _put_back(magics, name, function, before))

    def callback(self, event: str, function: Callable[..., Any]) -> None:
        self._shell.events.register(event, function)

        def undo() -> None:
            if function in self._shell.events.callbacks[event]:
                self._shell.events.unregister(event, function)

        self._undo.append(undo)

    def item(self, items: list[Any], item: object) -> None:
        items.append(item)
        self._undo.append(lambda: items.remove(item) if item in items else None)

    def method(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        """Override a method on this object. Removing the override restores what was there before."""
        own = vars(owner)
        before = own.get(name, _MISSING)
        setattr(owner, name, function)
        self._undo.append(lambda: _put_back(own, name, function, before))

    def undo(self) -> None:
        """Remove any of our parts that are still installed, in reverse order. Calling this again does nothing."""
        while self._undo:
            self._undo.pop()()


def _put_back(names: MutableMapping[str, Any], name: str, ours: object, before: object) -> None:
    if names.get(name) != ours:
        return
    if before is _MISSING:
        del names[name]
    else:
        names[name] = before
