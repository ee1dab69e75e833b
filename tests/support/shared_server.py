"""One Jupyter server for many tests: between tests its world is reset, except for the server's process."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.world import Server, World

__all__ = ["SharedServer"]

_FOLDERS = ("data", "run", "config", "home", "notebooks", "ipython")
_OF_THE_SERVER = ("jpserver-*", "jupyter_cookie_secret")


class SharedServer:
    """Starts a world with a server for the first test, and another one after a test that failed or ended the server."""

    def __init__(self, prepare: Callable[[World], object] = lambda _: None) -> None:
        """`prepare` is called before a server starts."""
        self._prepare = prepare
        self._lent: tuple[World, Server] | None = None

    @contextmanager
    def borrowed(self) -> Iterator[World]:
        """Lend the world for one test. Fails, as a world's end does, if a process is left that still uses the simulated host."""
        with self._closed_on_error():
            if self._lent is None:
                self._lent = self._new()
            world, server = self._lent
            environment = dict(world.environment)
            yield world
            if not server.reusable:
                self.close()
                return
            server.clear()
            world.end_broker()
            _empty(world.folder)
            world.environment = environment

    def _new(self) -> tuple[World, Server]:
        world = World.new()
        try:
            self._prepare(world)
            return world, Server(world)
        except BaseException:
            world.close()
            raise

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def server_of(self, world: World) -> Server | None:
        return self._lent[1] if self._lent is not None and self._lent[0] is world else None

    def close(self) -> None:
        if self._lent is not None:
            world, server = self._lent
            self._lent = None
            try:
                server.stop()
            finally:
                world.close()


def _empty(folder: Path) -> None:
    """Remove everything except what the server wrote at its start; a test may have changed any folder."""
    kept = {path for pattern in _OF_THE_SERVER for path in (folder / "run").glob(pattern)}
    for path in folder.iterdir():
        if path.name not in _FOLDERS and path.name != "server.err":
            _remove(path)
    for name in _FOLDERS:
        place = folder / name
        place.mkdir(exist_ok=True)
        place.chmod(0o700)
        for path in place.iterdir():
            if path not in kept:
                _remove(path)
    (folder / "server.err").write_bytes(b"")  # the server continues at its end: it appends


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
