"""Callbacks when packages are imported and when their functions are called. Nothing is imported for it.

The user's cells import frameworks, long after this extension was loaded. `ImportHooks` is an entry of `sys.meta_path`: for each module
that is imported it costs one dictionary lookup; the import of a watched module ends with a callback.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

Callback = Callable[[ModuleType], None]
_MARK = "__noted_by_jupyter_gpu__"  # of a wrapped function: wrappers of others that copy its attributes carry it, too


class ImportHooks:
    """Calls back at the end of imports. One object serves a process: two would unwrap each other's loaders."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}

    def after(self, name: str, callback: Callback) -> None:
        """Call back in the importing thread each time that module `name` has been executed; now, too, if it is there already."""
        module = sys.modules.get(name)
        if module is not None and not is_half_imported(module):
            callback(module)
        self._callbacks.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Watch no more imports; may be called twice."""
        self._callbacks = {}
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the finders behind this one find, with a callback in it for a watched module."""
        if name not in self._callbacks:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None and not isinstance(spec.loader, type):  # of built-in modules it is a class
                    self._hook(spec.loader, name)
                return spec
        return None

    def _hook(self, loader: Any, name: str) -> None:  # noqa: ANN401 - a loader is whatever importlib found
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if vars(loader).get("exec_module") is exec_module:  # unless other code has wrapped it since
                del loader.exec_module  # the loader is as it was before other code uses it
            execute(module)
            for callback in self._callbacks.get(name, ()):
                callback(module)

        loader.exec_module = exec_module


class Call(NamedTuple):
    """A function whose calls are reported. It exists once `package` is imported; callers find it in `modules`.

    `function` may be `Class.method`. `applies` decides from the arguments whether a call counts.
    """

    package: str
    modules: tuple[str, ...]
    function: str
    sentence: str
    applies: Callable[[Sequence[Any], Mapping[str, Any]], bool] | None = None


def note_calls(call: Call, report: Callable[[str], None]) -> None:
    """Call `report` with the sentence before each call that counts, in the thread of the call. Missing functions are left out."""
    for name in call.modules:
        owner: Any = sys.modules.get(name)
        *parents, function = call.function.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        original = getattr(owner, function, None)
        if owner is not None and callable(original) and not hasattr(original, _MARK):
            setattr(owner, function, _noting(original, call, report))


def _noting(original: Callable[..., Any], call: Call, report: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the framework's function takes and gives
        if call.applies is None or call.applies(args, kwargs):
            report(call.sentence)
        return original(*args, **kwargs)

    setattr(noted, _MARK, True)
    return noted


def is_half_imported(module: ModuleType) -> bool:
    """Return whether another thread, or a cell further up, is still executing the module."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
