"""Whether a peer reads is seen without a word of it."""

import socket
import threading

import pytest

from fractional_gpu.host import process
from fractional_gpu.host.process import detects_unread, unread


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


def test_a_closed_socket_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    theirs.close()
    with pytest.raises((OSError, ValueError)):
        unread(ours)


def test_linux_tells_it() -> None:
    assert detects_unread()


@pytest.mark.parametrize("answer", [True, False, OSError(25, "Inappropriate ioctl for device")])
def test_a_system_that_does_not_tell_it_is_not_trusted(monkeypatch: pytest.MonkeyPatch, answer: bool | OSError) -> None:
    def told(_sock: socket.socket) -> bool:
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(process, "unread", told)
    assert not detects_unread()
