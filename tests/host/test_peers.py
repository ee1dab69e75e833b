"""The peer of a socket, and whether it reads, is known without a message from it."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fractional_gpu.host.peers import peer_credentials, peer_groups, unread


def test_peer_credentials_are_the_kernels() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert peer_credentials(here) == (os.getpid(), os.getuid(), os.getgid())


def test_peer_groups_are_all_that_the_peer_is_in() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert peer_groups(here) == {os.getgid(), *os.getgroups()}


def test_peer_credentials_name_the_process_that_connected(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE) as process:
            connection, _ = listener.accept()
            with connection:
                assert peer_credentials(connection).pid == process.pid
            process.communicate()


def test_sockets_without_a_peer_are_refused() -> None:
    with socket.socket(socket.AF_UNIX) as unconnected, pytest.raises(ValueError, match="not connected"):
        peer_credentials(unconnected)
    with socket.socket(socket.AF_INET) as internet, pytest.raises(ValueError, match="AF_INET"):
        peer_credentials(internet)


def test_what_was_written_is_unread_until_the_last_byte_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not unread(ours)
        ours.sendall(b"a line\n")
        ours.sendall(b"another\n")
        theirs.recv(10)
        assert unread(ours)
        theirs.recv(100)
        assert not unread(ours)


def test_who_waits_for_bytes_has_read_them() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        waiting = threading.Thread(target=theirs.recv, args=(100,))
        waiting.start()
        ours.sendall(b"a line\n")
        waiting.join(30)
        assert not unread(ours)
