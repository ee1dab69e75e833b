"""Slurm's accounting database on this machine: Debian's slurmdbd and mariadbd in a separate folder, for `tests/run slurmdbd`."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.world import World, until

__all__ = ["Accounting", "new_accounting"]

_SLURMDBD = """\
AuthType=auth/munge
AuthInfo=socket={munge}
DbdHost=localhost
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage}
StorageUser=slurm
StoragePass=slurm
StorageLoc=acct
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
_SLURM = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={munge}
FederationParameters=fed_display"""
_USERS = " ".join(
    f"create user slurm@{host} identified by 'slurm'; grant all on acct.* to slurm@{host};"
    for host in ("localhost", "127.0.0.1")
)


class Accounting:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port, self._storage = free_ports(2)
        self._maria: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}

    def lines(self, munge: Path) -> str:
        return _SLURM.format(port=self._port, munge=munge)

    def begin(self, munge: Path, environment: Mapping[str, str]) -> None:
        """Start slurmdbd, which reads its configuration next to slurm.conf; a second cluster finds it running."""
        if self._environment:
            return
        self._environment = dict(environment)
        conf = Path(environment["SLURM_CONF"]).with_name("slurmdbd.conf")
        conf.touch(mode=0o600)
        conf.write_text(_SLURMDBD.format(munge=munge, port=self._port, storage=self._storage, folder=self.folder))
        self.start()

    def start(self) -> None:
        assert self._run("slurmdbd") is not None
        until(lambda: self._run("sacctmgr", "-n", "list", "cluster") is not None, "slurmdbd answers")

    def stop(self) -> None:
        World.end(self.pid, signal.SIGTERM)

    @property
    def pid(self) -> int:
        return int((self.folder / "slurmdbd.pid").read_text())

    def start_storage(self) -> None:
        data, place = self.folder / "data", f"--socket={self.folder}/socket"
        install = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"]
        assert self._run(*install, "--auth-root-authentication-method=normal") is not None
        ports = [f"--port={self._storage}", "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=32M"]
        command = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", place, *ports]
        with (self.folder / "mariadbd.log").open("wb") as log:
            self._maria = subprocess.Popen(command, env=_environment(), stdout=log, stderr=log)
        ask = ["mariadb", "--no-defaults", "-uroot", place, "-e"]
        until(lambda: self._run(*ask, "select 1") is not None, "mariadbd answers")
        assert self._run(*ask, f"create database acct; {_USERS}") is not None

    def _run(self, *words: str) -> str | None:
        """Run a command and return what it printed; None: it failed. A daemon that it starts does not keep our pipes."""
        with tempfile.TemporaryFile() as out:
            environment = {**_environment(), **self._environment}
            done = subprocess.run(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False, timeout=60
            )
            out.seek(0)
            return out.read().decode() if done.returncode == 0 else None

    def close(self) -> None:
        if (self.folder / "slurmdbd.pid").exists():
            World.end(self.pid, signal.SIGKILL)
        if self._maria is not None:
            self._maria.terminate()
            self._maria.wait(60)


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))}


@contextmanager
def new_accounting() -> Iterator[Accounting]:
    folder = Path(tempfile.mkdtemp(prefix="jfg-slurmdbd-"))
    accounting = Accounting(folder)
    try:
        accounting.start_storage()
        yield accounting
    finally:
        accounting.close()
        shutil.rmtree(folder)
